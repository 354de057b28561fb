"""GGUF, the one-file format of llama.cpp, converted into a Hugging Face directory: `convert` is the entry.

`reader` opens a file and refuses a damaged one, `config` writes its hyper-parameters as config.json does, `tensors`
gives its weights their Hugging Face names and layout, `tokenizer` and `pretokenizers` build tokenizer.json,
`conversion` joins them, `cache` does so once per file, and `smollm2` finds a model that comes in a Python package.
"""
