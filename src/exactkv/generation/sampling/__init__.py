"""Choosing tokens from logits: what may be set (`settings`), what it does to logits (`processors`) and probabilities
(`filters`), randomness (`noise`), and the choice itself (`choice`)."""

from exactkv.generation.sampling.choice import Choice, Logprobs, choose, choose_run
from exactkv.generation.sampling.history import History
from exactkv.generation.sampling.settings import GREEDY, Sampling

__all__ = ["GREEDY", "Choice", "History", "Logprobs", "Sampling", "choose", "choose_run"]
