"""Until `torch-promote run` and TORCH_PROMOTE_AUTOCAST exist: installs at the start of Python."""

import os

if os.environ.get("TORCH_PROMOTE_AUTOCAST") == "1":
    import torch_promote

    _override = os.environ.get("ECOSYSTEM_OVERRIDE")
    torch_promote.install(
        policy=os.environ.get("TORCH_PROMOTE_POLICY", None),
        overrides=dict([_override.split("=")]) if _override else None,
    )
