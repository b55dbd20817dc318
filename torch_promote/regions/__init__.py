"""`my_autocast`, the base class that it shares with `promotion`, and defaults for a whole program."""

from types import ModuleType

from torch_promote.policy.module_tables import register_module_finder


def _module_policies() -> ModuleType:
    from torch_promote.regions import module_policies  # most programs do not need it

    return module_policies


register_module_finder(_module_policies)
