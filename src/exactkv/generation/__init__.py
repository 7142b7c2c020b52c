"""Text from a model: sampling and the token loop."""

from exactkv.generation.loop import Generation, Piece, Prompt, Stats, end_token_ids, prompt_ids, stream
from exactkv.generation.sampling import GREEDY, Choice, History, Logprobs, Sampling, choose, choose_run

__all__ = [
    "GREEDY", "Generation", "Piece", "Prompt", "Sampling", "Stats", "end_token_ids", "prompt_ids", "sample",
    "stream",
]  # fmt: skip
