"""GGUF, the one-file format of llama.cpp, converted into a Hugging Face directory: `convert` is the entry.

`reader` opens a file and refuses a damaged one, `families` is the table of architectures, `config` and `derived` write
their hyper-parameters as config.json does, `tensors` gives the weights their Hugging Face names and layout, `numbers`
dequantizes them, `tokenizer` and `pretokenizers` build tokenizer.json, `conversion` joins all that, `cache` does so
once per file, and `smollm2` finds a model that comes in a Python package. `writing` and `vocabulary` go the other way.
"""
