"""llama_cpp_bench.py FILE.gguf THREADS PREFILL DECODE DEPTH: one round of llama.cpp, as one JSON line.

Prefills PREFILL tokens and decodes DECODE more after DEPTH tokens of context, PREFILL at least. Tokenising
and sampling are outside the times, as in llama-bench. Needs llama-cpp-python from pip, which compiles llama.cpp
for this processor.
"""

import ctypes
import json
import sys
import time

import llama_cpp as L

path, threads, prefill, decode, depth = sys.argv[1], *map(int, sys.argv[2:6])
L.llama_backend_init()
quiet = L.llama_log_callback(lambda *_: None)  # Kept: llama.cpp calls it until exit.
L.llama_log_set(quiet, ctypes.c_void_p(0))
model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
params = L.llama_context_default_params()
params.n_ctx = max(prefill, depth) + decode + 16
params.n_batch = params.n_ubatch = 512
params.n_threads = params.n_threads_batch = threads
vocabulary = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))


def feed(context, count):
    """Seconds to feed `count` tokens in batches of 512."""
    tokens = (L.llama_token * count)(*[(i * 7919 + 13) % (vocabulary - 1) + 1 for i in range(count)])
    start = time.perf_counter()
    for first in range(0, count, 512):
        size = min(512, count - first)
        pointer = ctypes.cast(ctypes.byref(tokens, first * 4), ctypes.POINTER(L.llama_token))
        assert L.llama_decode(context, L.llama_batch_get_one(pointer, size)) == 0
    L.llama_synchronize(context)
    return time.perf_counter() - start


context = L.llama_init_from_model(model, params)
feed(context, 16)  # Warm-up.
L.llama_free(context)
context = L.llama_init_from_model(model, params)
prefill_seconds = feed(context, prefill) if prefill else 0.0
if depth > prefill:
    feed(context, depth - prefill)
one = (L.llama_token * 1)(7)
start = time.perf_counter()
for _ in range(decode):
    assert L.llama_decode(context, L.llama_batch_get_one(one, 1)) == 0
    L.llama_synchronize(context)
decode_seconds = time.perf_counter() - start
print(json.dumps({
    "prefill_tokens_per_sec": prefill / prefill_seconds if prefill else None,
    "decode_tokens_per_sec": decode / decode_seconds if decode else None,
}))
