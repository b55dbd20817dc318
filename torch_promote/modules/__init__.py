"""Policies of modules.

- module_policies: `set_module_policy` and the functions around it; which modules get which policy
- module_forward: how a module gets its policy: an instance attribute `forward`
- module_policy: the policy of a module, and a call under it
"""
