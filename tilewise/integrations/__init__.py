"""tilewise under the names and hooks of other libraries. Each module needs its own, and says so if it is missing.

transformers.py: `attn_implementation="tilewise"`. sdpa.py: `torch.nn.functional.scaled_dot_product_attention`.
flash_impl.py: PyTorch's own hook for flash attention. flash_attn/: the functions of the package flash_attn.
diffusers.py: an attention backend of diffusers. What a caller asks and tilewise cannot do is an error, never ignored.
"""
