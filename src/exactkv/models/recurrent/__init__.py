"""Recurrent mixers: what takes attention's place in a layer, or stands beside it, and keeps a state."""
