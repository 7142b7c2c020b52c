"""Text from a model: sampling, stopping and the token loop."""

from exactkv.generation.batch import Completion, generate, generate_each
from exactkv.generation.draft import Draft, ModelDraft, PromptLookup
from exactkv.generation.engine import Engine
from exactkv.generation.loop import Generation, Stats, stream
from exactkv.generation.perplexity import Perplexity, perplexity
from exactkv.generation.prompts import Prompt, end_token_ids, prompt_ids
from exactkv.generation.request import Request, Update
from exactkv.generation.sampling import GREEDY, Choice, History, Logprobs, Sampling, choose, choose_run
from exactkv.generation.stopping import Ending, Stopping
from exactkv.generation.structure import Structure
from exactkv.generation.text import Piece, Text, make_text

__all__ = [
    "GREEDY",
    "Choice",
    "Completion",
    "Draft",
    "Ending",
    "Engine",
    "Generation",
    "History",
    "Logprobs",
    "ModelDraft",
    "Perplexity",
    "Piece",
    "Prompt",
    "PromptLookup",
    "Request",
    "Sampling",
    "Stats",
    "Stopping",
    "Structure",
    "Text",
    "Update",
    "choose",
    "choose_run",
    "end_token_ids",
    "generate",
    "generate_each",
    "make_text",
    "perplexity",
    "prompt_ids",
    "stream",
]  # fmt: skip
