"""Text from a model: sampling, stopping and the token loop."""

from exactkv.generation.draft import Draft, ModelDraft, PromptLookup
from exactkv.generation.loop import Generation, Stats, stream
from exactkv.generation.prompts import Prompt, end_token_ids, prompt_ids
from exactkv.generation.sampling import GREEDY, Choice, History, Logprobs, Sampling, choose, choose_run
from exactkv.generation.stopping import Ending, Stopping
from exactkv.generation.text import Piece

__all__ = [
    "GREEDY", "Choice", "Draft", "Ending", "Generation", "History", "Logprobs", "ModelDraft", "Piece", "Prompt",
    "PromptLookup", "Sampling", "Stats", "Stopping", "choose", "choose_run", "end_token_ids", "prompt_ids",
    "stream",
]  # fmt: skip
