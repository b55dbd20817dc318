"""Programs that end in every way while torch_promote holds state: the states, the ends, and what a program consists of.

A state is code that leaves something in force: an open region, kept casts, a suspended generator. An end is code that
ends the process or the thread. A program is the preamble, a state and an end. `END` tells the state which of them runs.
"""

from __future__ import annotations

import signal
import textwrap
from typing import NamedTuple

__all__ = ["ENDS", "STATES", "End", "program"]

PREAMBLE = """
import atexit, os, sys, threading, torch
import torch_promote as tp
torch.set_num_threads(1)
x, w = torch.ones(4, 4), torch.nn.Parameter(torch.ones(4, 4))

def use():
    y = x @ w
    y.float().sum().backward()
    with tp.my_autocast("cpu", overrides={"exp": "fp32"}), torch.autocast("cpu", dtype=torch.float16):
        assert (x @ w).dtype is torch.float16
    return y
"""

#: What a program has when it ends. The names are those of the table in docs/reliability.md.
STATES = {
    "region open": "tp.my_autocast('cpu').__enter__(); use()",
    "regions nested": """
        tp.my_autocast('cpu', overrides={'matmul': 'float16'}).__enter__()
        torch.autocast('cpu').__enter__()
        tp.my_autocast('cpu', cache='all').__enter__()
        use()
        """,
    "decorated function": """
        @tp.my_autocast('cpu', overrides={'matmul': 'float16'})
        def inside(): use(); end()
        """,
    "persistent casts": """
        weights = [torch.nn.Parameter(torch.ones(8, 4)) for _ in range(8)]
        with tp.my_autocast('cpu', cache='persistent'), torch.no_grad():
            casts = [torch.nn.functional.linear(x, weight) for weight in weights]
        assert tp.cache_info()['persistent_entries'] == 8
        """,
    "used at exit": """
        @atexit.register
        def at_exit():
            with tp.my_autocast('cpu', cache='persistent'): use()
            tp.promotion('jax').__enter__()
        # What these import evaluates code, by which Python forgets that a KeyboardInterrupt ended it.
        tp.promotion('jax')
        with tp.my_autocast('cpu', cache='persistent'): pass
        """,
    "used in __del__": """
        class Last:
            def __init__(self): self.tp, self.x, self.w = tp, x, w
            def __del__(self):
                with self.tp.my_autocast('cpu', overrides={'matmul': 'float16'}): self.x @ self.w
        last, sys.last = Last(), Last()
        cycle = [Last()]; cycle.append(cycle)
        """,
    "thread-local": """
        class OfThread(threading.local): pass
        of_thread = OfThread()
        of_thread.region = tp.my_autocast('cpu', cache='all'); of_thread.region.__enter__()
        of_thread.result = x @ w
        """,
    "install()": "tp.install(overrides={'matmul': 'float16'}, cache='all'); torch.autocast('cpu').__enter__(); x @ w",
    "promotion": "tp.promotion('jax').__enter__(); torch.ones(2, dtype=torch.int32) + torch.ones(2).half(); use()",
    "trace": "block = tp.trace(values=True); block.__enter__(); tp.my_autocast('cpu').__enter__(); x @ w",
    "crosscheck": "block = tp.crosscheck(); block.__enter__(); tp.my_autocast('cpu').__enter__(); x @ w",
    "suspended generator": """
        @tp.my_autocast('cpu', cache='all')
        def steps():
            with tp.promotion('jax'), tp.my_autocast('cpu', overrides={'matmul': 'float16'}):
                while True: yield x @ w
        suspended = steps(); next(suspended)
        sys.suspended = steps(); next(sys.suspended)
        """,
    "task pending": """
        import asyncio
        async def work():
            with tp.my_autocast('cpu'):
                x @ w
                await asyncio.Event().wait()
        async def main():
            global task
            task = asyncio.ensure_future(work())
            await asyncio.sleep(0)
        asyncio.run(main())
        """,
    "graph alive": """
        from torch.utils.checkpoint import checkpoint
        with tp.my_autocast('cpu', overrides={'matmul': 'float16'}):
            graph = checkpoint(lambda x: (x @ w).exp(), x, use_reentrant=False).sum() + (x @ w).float().sum()
        """,
    "module policies": """
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        tp.set_module_policy(model, {'0': 'fp32', '1': {'linear': 'float16'}})
        tables = tp.Policy.stock().override_modules({'1': {'linear': 'float16'}})
        handle = tables.apply_to(model)
        tp.my_autocast('cpu', policy=tables, model=model).__enter__()
        model(x)
        """,
    "registered policies": """
        handle = tp.register_policy('tanh', 'lower')
        tp.set_default_policy(tp.Policy.named('fp32_safe'))
        with tp.my_autocast('cpu'): assert x.tanh().dtype is torch.bfloat16
        """,
}


class End(NamedTuple):
    """A way in which a program ends.

    Attributes:
        code: What ends it; it is the body of a function.
        status: The exit status.
        out: What it has printed.
    """

    code: str
    status: int = 0
    out: str = ""

    def is_met(self, status: int, out: str, err: str) -> bool:
        """Whether a program has ended like this, and said nothing else."""
        if self is ENDS["daemon threads"] and (status, err.strip()) == STOCK_ABORTS:
            return True
        if any(text in err for text in ("terminate called", "Fatal Python error", "Exception ignored")):
            return False
        said = err.splitlines()
        if self.status == -signal.SIGINT:  # the last line of a traceback
            return (status, out, said[-1:]) == (self.status, self.out, ["KeyboardInterrupt"])
        return (status, out, said) == (self.status, self.out, [])


#: Before Python 3.14, a daemon thread that waits for the GIL when Python ends is ended by pthread_exit. If PyTorch's
#: C++ is on its stack, as in any call of an op, that calls std::terminate. Programs without torch_promote end
#: like this, too.
STOCK_ABORTS = (-6, "terminate called without an active exception")

#: The ends.
ENDS = {
    "shutdown": End("pass"),
    "sys.exit": End("sys.exit(3)", 3),
    "sys.exit in a thread": End(
        """
        def leave():
            with tp.my_autocast('cpu'): use(); sys.exit(3)
        thread = threading.Thread(target=leave); thread.start(); thread.join()
        """
    ),
    "os._exit": End("os._exit(4)", 4),
    "fork, os._exit": End(
        """
        child = os.fork()
        if child == 0:
            with tp.my_autocast('cpu'): use()
            tp.clear_cache()
            os._exit(5)
        use()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        """,
        out="5\n",
    ),
    "fork, sys.exit": End(
        """
        child = os.fork()
        if child == 0:
            use()
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        """,
        out="5\n",
    ),
    "fork in a thread": End(
        """
        def work():
            tp.my_autocast('cpu').__enter__(); use()
            child = os.fork()
            if child == 0:
                use()
                os._exit(5)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        thread = threading.Thread(target=work); thread.start(); thread.join()
        """,
        out="5\n",
    ),
    "thread exit": End(
        """
        def work():
            tp.my_autocast('cpu', cache='all').__enter__()
            tp.my_autocast('cpu', overrides={'matmul': 'float16'}).__enter__()
            use()
        for _ in range(3):
            thread = threading.Thread(target=work); thread.start(); thread.join()
        use()
        """
    ),
    "daemon threads": End(
        """
        started = threading.Barrier(3)
        def work():
            started.wait()
            while True:
                with tp.my_autocast('cpu', cache='persistent'), torch.no_grad(): x @ w
                with tp.promotion('jax'), tp.my_autocast('cpu', overrides={'matmul': 'float16'}): x @ w
        for _ in range(2): threading.Thread(target=work, daemon=True).start()
        started.wait()
        """
    ),
    "KeyboardInterrupt": End("import signal; signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
}


def program(state: str, end: str) -> str:
    """Returns the program that ends in a way while it has a state.

    Args:
        state: A key of `STATES`.
        end: A key of `ENDS`.
    """
    ending = textwrap.indent(textwrap.dedent(ENDS[end].code), "    ")
    having = textwrap.dedent(STATES[state])
    ends = "inside()" if "def inside" in having else "end()"
    return f"{PREAMBLE}\ndef end():\n{ending}\n\n{having}\n{ends}\n"
