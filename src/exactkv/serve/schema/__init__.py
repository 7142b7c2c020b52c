"""What requests and responses hold, for each API. Requests refuse what they do not know."""
