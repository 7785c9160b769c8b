"""Where latents live between steps: record formats, pools, and the index plans that reach them."""
