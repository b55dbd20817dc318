"""Policies of modules.

- module_policies: `set_module_policy` and the functions around it; which modules get which policy
- module_class: how a module gets its policy: a subclass whose forward runs in a nested region
"""
