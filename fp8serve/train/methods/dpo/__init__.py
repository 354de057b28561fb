"""Direct preference optimisation (Rafailov et al. 2023) and its variants: preferred completions become more likely."""
