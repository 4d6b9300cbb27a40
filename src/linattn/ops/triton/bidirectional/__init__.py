"""Every query sees every key: feature maps inside the kernels, one program a head or segments."""
