"""What a program may do at a place, so that it is correct under stock.

The rules follow docs/differences.md and the limits in docs/casts.md:

- Within an outermost region, stock casts a trainable float32 weight once. A later write would leave that cast stale,
  and a region of another dtype would get the wrong cast. So a program does neither.
- A checkpoint runs its function again in the backward, in one region, and in the region that is open then.
- Stock and ours have a cast each. So a weight that a stock region casts is not used in a region of ours inside it.
- `promote` raises for float16 in a region of bfloat16, and the reverse.
- Stock's cache belongs to the process. So threads run while no region is open.
- A captured graph has the addresses of the weights. So no weight moves while there is a graph.
- Autograd refuses writes to what it has saved. Such programs are correct, but compare little.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


class Unfit(Exception):  # noqa: N818 (not an error)
    """A statement may not stand at this place."""


@dataclass(slots=True)
class Frame:
    """An open region."""

    ours: bool
    enabled: bool
    dtype: str
    cached: bool


@dataclass(slots=True)
class State:
    """What is known at a place of a program before it runs."""

    device: str
    mode: str
    layers: list[str]
    frames: list[Frame] = field(default_factory=list)
    #: The casts in stock's cache: the weight's number, the dtype, and whether ours or stock made it.
    casts: dict[int, tuple[str, bool]] = field(default_factory=dict)
    #: The casts that checkpoints will make again in a backward.
    recomputed: dict[int, tuple[str, bool]] = field(default_factory=dict)
    #: The number of the weight of each layer. Tied layers have the same.
    weights: list[int] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)
    #: Layers with weights in half precision, and their dtypes.
    half: dict[int, str] = field(default_factory=dict)
    #: Layers with a policy of their own.
    policies: dict[int, str] = field(default_factory=dict)
    #: Weights that autograd may have saved.
    saved: set[int] = field(default_factory=set)
    #: The lower dtypes that `h` may have.
    lower: set[str] = field(default_factory=set)
    pending: int = 0
    #: Something else refers to a graph of autograd.
    held: bool = False
    graphs: int = 0
    #: The kinds of blocks that are open.
    inside: Counter[str] = field(default_factory=Counter)
    depth: int = 0
    #: Counts local names.
    named: int = 0
    next_weight: int = 100

    def __post_init__(self) -> None:
        self.weights = self.weights or list(range(len(self.layers)))

    # --- places

    @property
    def enabled(self) -> bool:
        """Whether autocast is on."""
        return bool(self.frames) and self.frames[-1].enabled

    @property
    def _handled_by_ours(self) -> bool:
        """Whether ours casts here. In a stock region inside a disabled region of ours, stock does."""
        ours = [frame.enabled for frame in self.frames if frame.ours]
        return bool(ours) and ours[-1]

    def restart(self) -> None:
        """`h` is float32 from here on."""
        self.lower.clear()

    @property
    def h(self) -> str:
        """The current activation, as an op that computes outside of a region needs it."""
        return "h" if self.enabled else "h.float()"

    def need(self, fits: bool) -> None:
        """Raises unless it is true."""
        if not fits:
            raise Unfit

    def need_not_in(self, *blocks: str) -> None:
        """Raises inside one of these blocks."""
        if any(self.inside[block] for block in blocks):
            raise Unfit

    def need_top(self) -> None:
        """Raises inside a function that may run again, or whose ops have another policy."""
        self.need_not_in("function", "overriding", "inference", "policy_off")

    def need_outside(self) -> None:
        """Raises inside a region."""
        self.need_top()
        self.need(not self.frames)

    def name(self, stem: str) -> str:
        """A new local name."""
        self.named += 1
        return f"{stem}{self.named}"

    # --- weights

    def of(self, *kinds: str) -> list[int]:
        """The layers of some kinds."""
        return [at for at, layer in enumerate(self.layers) if layer in kinds]

    def use(self, layer: int, how: str, called: bool = True) -> None:
        """Uses the weight of a layer: how is "cast" (passed to an op that casts), "view", or "direct".

        A policy of the layer acts only where the layer is called.
        """
        self.need(layer < len(self.layers))
        weight = self.weights[layer]
        half = self.half.get(layer)
        self.need(half is None or self.enabled)
        own_policy = called and layer in self.policies
        if self.enabled and how == "cast" and not own_policy:
            frame = self.frames[-1]
            # A cast of a frozen weight, or in inference mode, is not in stock's cache.
            if frame.cached and half is None and not self.inside["inference"]:
                entry = (frame.dtype, self._handled_by_ours)
                if layer not in self.frozen:
                    self.need(self.casts.get(weight, entry) == entry)
                    self.casts[weight] = entry
                if self.inside["checkpoint"]:  # when it runs again, the weight may learn
                    self.need(self.recomputed.get(weight, entry) == entry)
                    self.recomputed[weight] = entry
        if not self.enabled or how == "direct" or half is not None or own_policy:
            self.saved.add(weight)

    def recompute(self) -> None:
        """Runs a backward, in which checkpoints cast weights again: in the region that is open."""
        if self.frames:
            self.need(all(self.casts.get(weight, entry) == entry for weight, entry in self.recomputed.items()))
            self.casts.update(self.recomputed)
        self.saved.clear()

    def write(self, layer: int, versioned: bool = True) -> None:
        """Writes to the weight of a layer."""
        self.need(layer < len(self.layers))
        self.need(self.weights[layer] not in self.casts)
        self.need(not versioned or self.weights[layer] not in self.saved)

    def write_to_all(self) -> None:
        """Writes to all weights."""
        self.need(not self.casts and not self.saved)

    def drop_graphs_of_autograd(self) -> None:
        """Drops `h` and the losses."""
        self.restart()
        self.saved.clear()
        self.pending = 0

    # --- regions

    def push(self, frame: Frame) -> None:
        """Opens a region."""
        self.need(len(self.frames) < 4)
        self.frames.append(frame)

    def pop(self) -> None:
        """Closes the innermost region."""
        self.frames.pop()
        if not self.frames:
            self.casts.clear()
