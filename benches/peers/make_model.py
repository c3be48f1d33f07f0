"""make_model.py SHAPE FOLDER: one random bf16 model as safetensors and as GGUF (bf16, Q8_0, Q4_K_M), for measuring.

Both hold the same shapes; the values are random, so nothing but speed can be compared.
Needs numpy, gguf and llama-cpp-python from pip.
"""

import ctypes
import json
import pathlib
import struct
import sys

import gguf
import llama_cpp
import numpy as np

# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied embeddings, biases on q, k and v
SHAPES = {
    "llama-1.1b": (2048, 5632, 22, 32, 4, 32000, False, False),
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True, True),
    "llama-8b": (4096, 14336, 32, 32, 8, 128256, False, False),
    "llama-160m": (768, 2048, 12, 12, 12, 32000, False, False),
}


def tensors(shape):
    """(safetensors name, GGUF name, shape) of every weight."""
    hidden, inner, layers, heads, kv_heads, vocabulary, tied, biased = shape
    head = hidden // heads
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
        yield ours + "mlp.gate_proj.weight", theirs + "ffn_gate.weight", (inner, hidden)
        yield ours + "mlp.up_proj.weight", theirs + "ffn_up.weight", (inner, hidden)
        yield ours + "mlp.down_proj.weight", theirs + "ffn_down.weight", (hidden, inner)


def main(name, folder):
    shape = SHAPES[name]
    hidden, inner, layers, heads, kv_heads, vocabulary, tied, biased = shape
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    family = "Qwen2ForCausalLM" if biased else "LlamaForCausalLM"
    config = {
        "architectures": [family], "model_type": "qwen2" if biased else "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "tie_word_embeddings": tied,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))

    arch = "qwen2" if biased else "llama"
    w = gguf.GGUFWriter(str(folder / "bf16.gguf"), arch)
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

    rng = np.random.default_rng(0)
    pool = (rng.standard_normal(1 << 24).astype(np.float32) * 0.02).view(np.uint32) >> 16
    pool = pool.astype(np.uint16)
    ones = np.full(1 << 18, 0x3F80, np.uint16)
    header, end, data = {}, 0, []
    for ours, theirs, dims in tensors(shape):
        count = int(np.prod(dims))
        start = int(rng.integers(0, 1 << 16))
        values = ones[:count] if "norm" in ours else np.resize(pool[start:], count)
        header[ours] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [end, end + 2 * count]}
        end += 2 * count
        data.append(values)
        if len(dims) == 1:
            w.add_tensor(theirs, (values.astype(np.uint32) << 16).view(np.float32))
        else:
            rows = values.reshape(dims).view(np.uint8).reshape(dims[0], dims[1] * 2)
            w.add_tensor(theirs, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for values in data:
            file.write(values.tobytes())

    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    for kind, label in ((llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q8"), (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, "q4")):
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = kind
        source, target = str(folder / "bf16.gguf"), str(folder / f"{label}.gguf")
        if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)) != 0:
            sys.exit(f"llama.cpp could not quantise {source} to {label}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: make_model.py {{{','.join(SHAPES)}}} FOLDER")
    main(sys.argv[1], sys.argv[2])
