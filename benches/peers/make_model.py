"""make_model.py SHAPE FOLDER [--plain]: one random bf16 model as safetensors and as GGUF (bf16, Q8_0, Q4_K_M), for
measuring; with --plain as safetensors only, which is all there is of mixtures.

Both hold the same shapes; the values are random, so nothing but speed can be compared.
Needs numpy from pip, and gguf and llama-cpp-python without --plain.
"""

import ctypes
import json
import pathlib
import struct
import sys

import numpy as np

# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied embeddings, biases on q, k and v
SHAPES = {
    "llama-1.1b": (2048, 5632, 22, 32, 4, 32000, False, False),
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True, True),
    "llama-3b": (3072, 8192, 28, 24, 8, 128256, True, False),
    "llama-8b": (4096, 14336, 32, 32, 8, 128256, False, False),
    "llama-160m": (768, 2048, 12, 12, 12, 32000, False, False),
}
# The same of mixtures, whose experts have the intermediate size, then experts and how many of them a token uses.
MIXTURES = {
    "moe-15b": ((2048, 768, 24, 32, 4, 151936, False, False), (128, 8)),
    "moe-30b": ((2048, 768, 48, 32, 4, 151936, False, False), (128, 8)),
}
# Of a mixture's heads; others have hidden / heads.
MIXTURE_HEAD = 128
POOL = 1 << 24


def tensors(shape, experts):
    """(safetensors name, GGUF name, shape) of every weight."""
    hidden, inner, layers, heads, kv_heads, vocabulary, tied, biased = shape
    head = MIXTURE_HEAD if experts else hidden // heads
    yield "model.embed_tokens.weight", "token_embd.weight", (vocabulary, hidden)
    if not tied:
        yield "lm_head.weight", "output.weight", (vocabulary, hidden)
    yield "model.norm.weight", "output_norm.weight", (hidden,)
    for i in range(layers):
        ours, theirs = f"model.layers.{i}.", f"blk.{i}."
        yield ours + "input_layernorm.weight", theirs + "attn_norm.weight", (hidden,)
        yield ours + "post_attention_layernorm.weight", theirs + "ffn_norm.weight", (hidden,)
        for name, rows in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * head)):
            yield ours + f"self_attn.{name}_proj.weight", theirs + f"attn_{name}.weight", (rows, hidden)
            if biased:
                yield ours + f"self_attn.{name}_proj.bias", theirs + f"attn_{name}.bias", (rows,)
        yield ours + "self_attn.o_proj.weight", theirs + "attn_output.weight", (hidden, heads * head)
        if experts:
            for name in ("q_norm", "k_norm"):
                yield ours + f"self_attn.{name}.weight", None, (head,)
            yield ours + "mlp.gate.weight", None, (experts[0], hidden)
        of_each = [f"experts.{expert}." for expert in range(experts[0])] if experts else [""]
        for expert in of_each:
            yield ours + f"mlp.{expert}gate_proj.weight", theirs + "ffn_gate.weight", (inner, hidden)
            yield ours + f"mlp.{expert}up_proj.weight", theirs + "ffn_up.weight", (inner, hidden)
            yield ours + f"mlp.{expert}down_proj.weight", theirs + "ffn_down.weight", (hidden, inner)


def config(shape, experts):
    """What config.json says."""
    hidden, inner, layers, heads, kv_heads, vocabulary, tied, biased = shape
    family, kind = ("Qwen2ForCausalLM", "qwen2") if biased else ("LlamaForCausalLM", "llama")
    said = {
        "architectures": [family], "model_type": kind, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "tie_word_embeddings": tied,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    if experts:
        said |= {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": MIXTURE_HEAD,
            "moe_intermediate_size": inner, "num_experts": experts[0], "num_experts_per_tok": experts[1],
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }
    return said


class Values:
    """Made-up numbers in bf16, from a pool that is used again and again."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        pool = (self.rng.standard_normal(POOL).astype(np.float32) * 0.02).view(np.uint32) >> 16
        self.pool = pool.astype(np.uint16)

    def of(self, name, dims):
        """Those of a weight, in pieces."""
        left = int(np.prod(dims))
        if "norm" in name:
            yield np.full(left, 0x3F80, np.uint16)
            return
        start = int(self.rng.integers(0, 1 << 16))
        while left > 0:
            piece = self.pool[start : start + left]
            yield piece
            left -= len(piece)
            start = 0


def write_safetensors(path, weights, values):
    header, end = {}, 0
    for name, _, dims in weights:
        bytes_of_it = 2 * int(np.prod(dims))
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [end, end + bytes_of_it]}
        end += bytes_of_it
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name, _, dims in weights:
            for piece in values.of(name, dims):
                file.write(piece.data)


def write_gguf(folder, name, shape, weights, values):
    import gguf

    hidden, inner, layers, heads, kv_heads, vocabulary, _, biased = shape
    w = gguf.GGUFWriter(str(folder / "bf16.gguf"), "qwen2" if biased else "llama")
    w.add_name(name)
    w.add_context_length(8192)
    w.add_embedding_length(hidden)
    w.add_block_count(layers)
    w.add_feed_forward_length(inner)
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(10000.0)
    w.add_rope_dimension_count(hidden // heads)
    w.add_vocab_size(vocabulary)
    w.add_tokenizer_model("no_vocab")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for ours, theirs, dims in weights:
        numbers = np.concatenate(list(values.of(ours, dims)))
        if len(dims) == 1:
            w.add_tensor(theirs, (numbers.astype(np.uint32) << 16).view(np.float32))
        else:
            rows = numbers.reshape(dims).view(np.uint8).reshape(dims[0], dims[1] * 2)
            w.add_tensor(theirs, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def quantise(folder):
    import llama_cpp

    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    for kind, label in ((llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q8"), (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, "q4")):
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = kind
        source, target = str(folder / "bf16.gguf"), str(folder / f"{label}.gguf")
        if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)) != 0:
            sys.exit(f"llama.cpp could not quantise {source} to {label}")


def main(name, folder, is_plain):
    shape, experts = MIXTURES.get(name) or (SHAPES[name], None)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape, experts), indent=2))
    weights, values = list(tensors(shape, experts)), Values()
    write_safetensors(folder / "model.safetensors", weights, values)
    if not is_plain:
        write_gguf(folder, name, shape, weights, values)
        quantise(folder)


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--plain"]
    is_plain = len(arguments) < len(sys.argv) - 1
    if len(arguments) != 2 or arguments[0] not in (SHAPES if not is_plain else SHAPES | MIXTURES):
        sys.exit(f"usage: make_model.py {{{','.join(SHAPES)}}} FOLDER\n"
                 f"       make_model.py {{{','.join(SHAPES | MIXTURES)}}} FOLDER --plain")
    main(*arguments, is_plain)
