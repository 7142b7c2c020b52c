"""Decoders as data, the one decoder built from them, and loading."""
