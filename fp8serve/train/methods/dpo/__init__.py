"""Direct preference optimisation (Rafailov et al. 2023) and its variants: better answers become likelier."""
