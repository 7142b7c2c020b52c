"""A server of one model for clients of the OpenAI and Anthropic APIs: ``exactkv serve``."""

from exactkv.serve.app import make_app
from exactkv.serve.options import ServeOptions
from exactkv.serve.run import serve

__all__ = ["ServeOptions", "make_app", "serve"]
