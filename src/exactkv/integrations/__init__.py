"""Adapters to other tools. Each imports its tool, so none is imported by exactkv itself."""
