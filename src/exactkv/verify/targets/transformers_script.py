"""The head of a reproduction script for transformers: the model and the calls, as source."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from pprint import pformat
from typing import Any

from transformers import AutoConfig

from exactkv.verify.targets import transformers_calls as calls

FUNCTIONS = {name: f for name, f in vars(calls).items() if inspect.isfunction(f) and f.__module__ == calls.__name__}


def script(recipe: dict[str, Any], functions: frozenset[str]) -> str:
    """Imports, the model, and ``functions`` of `transformers_calls` bound to it."""
    wanted = sorted({"full", *functions} & set(FUNCTIONS), key=list(FUNCTIONS).index)
    random = "config" in recipe
    used = closure([*wanted, "build"] if random else wanted)
    imports = inspect.getsource(calls).split('"""', 2)[2].split("\n\n\n")[0].strip()
    parts = [imports.replace("import inspect\n", "import inspect\nfrom functools import partial\n")]
    own = rf"(?<![.\w])({'|'.join(used)})\("  # calls among them: the names without underscore are bound to the model
    parts += [re.sub(own, r"_\1(", inspect.getsource(FUNCTIONS[name]).rstrip()) for name in FUNCTIONS if name in used]
    parts.append(random_model(recipe) if random else real_model(recipe))
    bound = ", ".join(wanted)
    parts.append(f"{bound} = {', '.join(f'partial(_{name}, model)' for name in wanted)}")
    if "generate" in wanted:
        parts.append("Request = SimpleNamespace")
    return "\n\n\n".join(parts[:-2]) + "\n\n\n" + "\n".join(parts[-2:]) + "\n"


def closure(names: list[str]) -> set[str]:
    """The functions named and those that they call."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            called = set(re.findall(r"(?<![.\w])(\w+)\(", inspect.getsource(FUNCTIONS[name])))
            left += [other for other in FUNCTIONS if other in called]
    return found


def random_model(recipe: dict[str, Any]) -> str:
    config = pformat(brief(recipe["config"]), width=116, compact=True, sort_dicts=False)
    options = [f"seed={recipe['seed']}", f"dtype={recipe.get('dtype', 'float32')!r}"]
    if recipe.get("attention"):
        options.append(f"attention={recipe['attention']!r}")
    infinity = 'inf = float("inf")\n' if re.search(r"\binf\b", config) else ""
    return f"{infinity}config = {config}\nmodel = _build(config, {', '.join(options)})"


def real_model(recipe: dict[str, Any]) -> str:
    options = [f"dtype=torch.{recipe.get('dtype', 'float32')}"]
    if recipe.get("attention"):
        options.append(f"attn_implementation={recipe['attention']!r}")
    model = recipe["model"]
    if model.endswith(".gguf"):
        options.append(f"gguf_file={Path(model).name!r}")
        model = str(Path(model).parent)
    return f"model = AutoModelForCausalLM.from_pretrained({model!r}, {', '.join(options)}).eval()"


def brief(config: dict[str, Any]) -> dict[str, Any]:
    """The config without what the class has by default, if that makes the same."""
    config = copy.deepcopy(config)  # the library writes into nested ones
    kind = config["model_type"]
    default = AutoConfig.for_model(kind).to_dict()
    short = {"model_type": kind} | {k: v for k, v in config.items() if k not in default or default[k] != v}
    try:
        same = AutoConfig.for_model(**copy.deepcopy(short)).to_dict() == AutoConfig.for_model(**config).to_dict()
    except Exception:  # some defaults fit only together
        same = False
    return short if same else config
