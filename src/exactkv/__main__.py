"""`python -m exactkv` is the `exactkv` command."""

from exactkv.cli.main import main

if __name__ == "__main__":
    main()
