"""The 20 kinds of fault that KV caches are known to have. Letters as in docs/verify.md."""

from __future__ import annotations

KINDS = {
    "A": "allocated size taken for live length",
    "B": "ring arithmetic: order after a wrap, writes larger than the ring",
    "C": "window, chunk or mask boundary",
    "D": "several tokens onto a warm cache differ from one pass",
    "E": "rewind claims more than it does",
    "F": "prefix reuse serves the state of another prefix",
    "G": "identity of a stored cache: other weights, dtype, tenant",
    "H": "recurrent state filed or restored at the wrong position",
    "I": "speculative rollback leaves a trace",
    "J": "padding leaks: a batch differs from its rows alone",
    "K": "merging, filtering or extending batches",
    "L": "position or rope",
    "M": "layers that differ: shared KV, latent, own sizes",
    "N": "quantized cache",
    "O": "save and load lose state",
    "P": "state crosses from one text or request to another",
    "Q": "memory bound not kept, or failure at the capacity's edge",
    "R": "scheduler: joins, leaves, preemption, stale slots",
    "S": "stopping and sampling",
    "T": "reuse silently does not happen, or is misreported",
}
