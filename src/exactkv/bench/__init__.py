"""How fast a model runs, beside what the machine allows: what `exactkv bench` measures, and in which words."""
