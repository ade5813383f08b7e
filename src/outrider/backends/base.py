"""The interface of a backend: layer arithmetic, attention over pages, compiled passes, sampling, memory, threads.

The code above a backend (scheduler, runner, drafters, models) sees token ids, slot mappings and block tables, but no
threads, packed weights, persistent buffers or graphs. `reference` defines what is correct; every other backend is
tested against it (tests/backends/test_contract.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from outrider.backends.attention import AttentionLayer, AttentionMetadata, PagedKV
from outrider.backends.batch import BatchBuilder, BlockTableArrays
from outrider.backends.drawing import DrawSettings
from outrider.kv.layout import KVLayout
from outrider.models.parameters import DecoderParameters, ExpertsMLP, Linear, Matrix
from outrider.models.spec import Activation, ExpertsSpec
from outrider.models.weight_forms import DENSE, WeightForms

Options = TypeVar("Options", bound=Hashable)
Result = TypeVar("Result")
Body = Callable[[Tensor, tuple[AttentionMetadata, ...], Options], Result]
"""A forward pass as a function of its input rows, the metadata of each KV group, and hashable options."""


class Capability(Enum):
    """A feature of a backend's attention. A decoder or drafter that needs a missing one is refused when it is
    loaded."""

    CAUSAL = "causal"
    NON_CAUSAL = "non-causal"
    WINDOW = "window"
    SINKS = "sinks"
    SOFTCAP = "softcap"


class Argmax(ABC):
    """The largest logit of each row, available once the pass that computes the logits has run."""

    @abstractmethod
    def read(self) -> tuple[list[int], list[float]]:
        """Returns the token id of each row's largest logit, and that logit. The lowest id wins among equal logits, and
        NaN is larger than any number."""

    @abstractmethod
    def probabilities(self) -> list[float]:
        """Returns the softmax probability of each row's largest logit."""

    def first(self, rows: int) -> Argmax:
        """Returns the argmax of the first rows."""
        return FirstRows(self, rows)


class FirstRows(Argmax):
    """The first rows of another argmax."""

    def __init__(self, whole: Argmax, rows: int) -> None:
        self._whole = whole
        self._rows = rows

    def read(self) -> tuple[list[int], list[float]]:
        token_ids, values = self._whole.read()
        return token_ids[: self._rows], values[: self._rows]

    def probabilities(self) -> list[float]:
        return self._whole.probabilities()[: self._rows]


class Pass(ABC, Generic[Options, Result]):
    """A forward pass that a backend may record and replay."""

    @abstractmethod
    def run(self, x: Tensor, groups: tuple[AttentionMetadata, ...], options: Options) -> Result:
        """Runs the pass. Its results may be overwritten by the next run of the same pass. A backend that captures
        passes for few numbers of rows adds rows at the end, to x, to the groups and thereby to the results, if the
        options are `PaddedOptions`; without options there are no results."""

    def enqueue(self, x: Tensor, groups: tuple[AttentionMetadata, ...], options: Options) -> None:
        """Schedules a pass without results to run before the next operation of the backend. One that is left at the end
        of a step may run while the engine prepares the next step, and has ended when that begins, or once `settle`
        returns. Neither `x` nor the tensors in `groups` may change until then."""
        self.run(x, groups, options)


@runtime_checkable
class PaddedOptions(Protocol):
    """Options that know what they become when a batch gets more rows at its end."""

    def padded(self, rows: int, padded_rows: int) -> Hashable: ...


class EagerPass(Pass[Options, Result]):
    """A pass that calls its body at every run."""

    def __init__(self, body: Body[Options, Result]) -> None:
        self._body = body

    def run(self, x: Tensor, groups: tuple[AttentionMetadata, ...], options: Options) -> Result:
        return self._body(x, groups, options)


class Backend(ABC):
    """Computes a model. Operations take rows and return rows; other rows of the batch may affect a row's result by
    rounding only."""

    name: str
    device: torch.device
    capabilities: frozenset[Capability] = frozenset()
    row_exact: bool = False
    """Whether a row's result is the same to the last bit whatever else is in the batch. Where it is, speculation on
    equals speculation off without exceptions."""
    default_dtype: torch.dtype = torch.float32
    """The dtype that a model computes in unless the user chooses one."""

    # ---- weights -----------------------------------------------------------------------------------

    def weight_forms(self, dtype: torch.dtype, *, expand: bool = False) -> WeightForms:
        """Returns the forms in which this backend keeps weights that a file stores in fewer bits than `dtype`.
        `expand`: all weights are converted to `dtype`."""
        return DENSE

    def prepare(self, parameters: DecoderParameters) -> DecoderParameters:
        """Returns the tensors in the form that the operations below take. Called once for each decoder."""
        return parameters

    def prepare_attention(self, layer: AttentionLayer) -> AttentionLayer:
        """Returns a layer's settings in the form that `attend` and `store` take."""
        return layer

    compacts: bool = False
    """Whether `compact` does anything."""

    def compact(self, matrix: Matrix) -> Matrix:
        """Returns a drafter's 16-bit matrix in 8 bits, if this backend then reads it faster. That may change drafts,
        but never the text, since drafts are verified."""
        return matrix

    def coarsen(self, matrix: Matrix) -> Matrix:
        """Returns a drafter's matrix in a form whose products are fast but less exact, if this backend has one. Its
        rows of x must not have a few elements that are far larger than all others. Never used for a target."""
        return matrix

    def keep(self, matrix: Matrix) -> Matrix:
        """Returns the matrix in memory that this backend has set aside for weights."""
        return matrix

    # ---- layer arithmetic --------------------------------------------------------------------------

    @abstractmethod
    def embed(self, token_ids: Tensor, embedding: Matrix, scale: float) -> Tensor:
        """Returns the embeddings of token ids times a scale: [rows, hidden]."""

    @abstractmethod
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the root-mean-square norm of each row."""

    @abstractmethod
    def project(self, x: Tensor, linear: Linear, *, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """Returns x Wᵀ + b. If `norm` is given, x is normed first."""

    @abstractmethod
    def project_add(
        self, x: Tensor, linear: Linear, residual: Tensor, *, post_norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor:
        """Returns residual + (x Wᵀ + b). If `post_norm` is given, the term in parentheses is normed before it is added.
        The result may overwrite the residual."""

    @abstractmethod
    def gated(self, x: Tensor, gate_up: Linear, activation: Activation, *, norm: Tensor, eps: float) -> Tensor:
        """Returns act(gate) * up of the normed rows: [rows, intermediate]."""

    @abstractmethod
    def experts(
        self, x: Tensor, mlp: ExpertsMLP, experts: ExpertsSpec, activation: Activation, *, norm: Tensor, eps: float
    ) -> Tensor:
        """Returns the weighted sum of each row's chosen experts: [rows, hidden]."""

    @abstractmethod
    def attend(self, qkv: Tensor, layer: AttentionLayer, kv: PagedKV, metadata: AttentionMetadata) -> Tensor:
        """Norms and rotates queries and keys, writes keys and values to their slots, and attends. Returns
        [rows, heads * head_dim]."""

    @abstractmethod
    def store(self, pairs: Tensor, layer: AttentionLayer, kv: PagedKV, metadata: AttentionMetadata) -> None:
        """Norms and rotates keys, and writes keys and values to their slots without reading any.

        `pairs`: [rows, 2 * kv_heads * head_dim], all keys and then all values."""

    def copy(self, x: Tensor, out: Tensor) -> None:
        """Copies the value that x has at this point of a pass to `out`."""
        out.copy_(x)

    # ---- passes ------------------------------------------------------------------------------------

    def compile_pass(self, body: Body[Options, Result], *, static: bool = True) -> Pass[Options, Result]:
        """Returns the pass that `body` describes. The backend may record it at its first run with a number of rows.

        `static`: `body` calls only operations of this backend, with arguments that depend on nothing but shapes and
        options; it keeps no views and does not write to x, and its weights and pages live as long as the pass."""
        return EagerPass(body)

    def step(self) -> AbstractContextManager[None]:
        """Surrounds the passes of one step. At its end, passes that are still enqueued begin; if the step fails, they
        are dropped."""
        return nullcontext()

    def settle(self) -> None:
        """Returns when the passes have ended that began at the end of the last step. Links and checksums, which read
        pages without the backend, need it first."""

    # ---- batches and sampling ----------------------------------------------------------------------

    def batch_builder(self, layout: KVLayout, tables: BlockTableArrays) -> BatchBuilder:
        """Returns the builder that turns spans of requests into batches. A batch may be overwritten by the second batch
        of as many rows that is built after it."""
        return BatchBuilder(layout, tables, self.device)

    @abstractmethod
    def argmax(self, logits: Tensor, *, probabilities: bool = False) -> Argmax:
        """Returns the largest logit of each row. `probabilities`: the caller will read their
        probabilities."""

    @abstractmethod
    def draw(self, logits: Tensor, settings: DrawSettings) -> Tensor:
        """Returns one token id for each row of float32 logits, as `reference.draw` defines it."""

    # ---- memory and threads ------------------------------------------------------------------------

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns zeroed memory for pages."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @abstractmethod
    def free_kv_bytes(self, memory_utilization: float) -> int:
        """Returns the number of bytes that pages may take if the user sets no budget."""

    def check_kv_bytes(self, kv_bytes: int) -> None:
        """Raises ConfigError if this many bytes of pages can never fit."""

    def exclusive_threads(self) -> AbstractContextManager[None]:
        """Keeps the threads of other libraries off the cores while weights are loaded."""
        return nullcontext()
