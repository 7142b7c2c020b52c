"""Text from a model: sampling, stopping and the token loop."""

from exactkv.generation.loop import Generation, Piece, Prompt, Stats, end_token_ids, prompt_ids, stream
from exactkv.generation.sampling import GREEDY, Choice, History, Logprobs, Sampling, choose, choose_run
from exactkv.generation.stopping import Ending, Stopping

__all__ = [
    "GREEDY", "Choice", "Ending", "Generation", "History", "Logprobs", "Piece", "Prompt", "Sampling", "Stats",
    "Stopping", "choose", "choose_run", "end_token_ids", "prompt_ids", "stream",
]  # fmt: skip
