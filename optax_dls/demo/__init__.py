"""``python -m optax_dls.demo``: handwritten digits in float32 and twice in float16."""
