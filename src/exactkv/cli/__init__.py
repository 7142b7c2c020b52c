"""The command line: a file a subcommand. Nothing heavy is imported before a command needs it."""
