"""Types for annotations: reports and what they consist of, what functions return, and what arguments may be.

The `load` of a report reads what its `save` wrote as JSON. The types of the reference are in `torch_promote.reference`.
Importing this module imports the modules of the tools; `import torch_promote` does not.

Example:
    >>> import torch, torch_promote as tp
    >>> from torch_promote.types import AppliedPolicy, CacheMode
    >>> def prepare(model: torch.nn.Module, file: str) -> AppliedPolicy:
    ...     return tp.Policy.load(file).apply_to(model)
    >>> def region(cache: CacheMode = "all") -> tp.my_autocast:
    ...     return tp.my_autocast("cpu", cache=cache)
"""

# `import X as X` says that this is the place to import X from.
from torch_promote.checking.crosscheck import CrosscheckLevel as CrosscheckLevel
from torch_promote.checking.report import CrosscheckReport as CrosscheckReport
from torch_promote.checking.report import Mismatch as Mismatch
from torch_promote.checking.why import Derivation as Derivation
from torch_promote.numerics.comparison import Comparison as Comparison
from torch_promote.numerics.comparison import GradientError as GradientError
from torch_promote.numerics.comparison import Metric as Metric
from torch_promote.numerics.comparison import Site as Site
from torch_promote.numerics.find_nonfinite import Attempt as Attempt
from torch_promote.numerics.find_nonfinite import NonfiniteReport as NonfiniteReport
from torch_promote.numerics.nonfinite import BenignKind as BenignKind
from torch_promote.numerics.nonfinite import NonfiniteKind as NonfiniteKind
from torch_promote.numerics.nonfinite import NonfiniteOrigin as NonfiniteOrigin
from torch_promote.numerics.nonfinite import OptimizerSteps as OptimizerSteps
from torch_promote.numerics.nonfinite import ScalerSteps as ScalerSteps
from torch_promote.numerics.tuning import Candidate as Candidate
from torch_promote.numerics.tuning import Certificate as Certificate
from torch_promote.numerics.tuning import Direction as Direction
from torch_promote.numerics.tuning import Level as Level
from torch_promote.numerics.tuning import Trial as Trial
from torch_promote.numerics.tuning import Tuning as Tuning
from torch_promote.observe.call import Argument as Argument
from torch_promote.observe.call import Call as Call
from torch_promote.observe.call import Cast as Cast
from torch_promote.observe.call import Phase as Phase
from torch_promote.observe.call import TensorInfo as TensorInfo
from torch_promote.observe.call import Unseen as Unseen
from torch_promote.observe.policy_sources import UnusedOverride as UnusedOverride
from torch_promote.policy.named_policies import PolicyName as PolicyName
from torch_promote.policy.op_table import CastPolicyName as CastPolicyName
from torch_promote.policy.op_table import DeviceType as DeviceType
from torch_promote.policy.op_table import DeviceTypes as DeviceTypes
from torch_promote.policy.op_table import OpPolicy as OpPolicy
from torch_promote.policy.policy import AppliedPolicy as AppliedPolicy
from torch_promote.policy.policy import ModulePolicyLike as ModulePolicyLike
from torch_promote.policy.policy import PolicyDiff as PolicyDiff
from torch_promote.policy.policy import PolicyDifference as PolicyDifference
from torch_promote.policy.policy import PolicyLike as PolicyLike
from torch_promote.policy.policy import PolicyOfModule as PolicyOfModule
from torch_promote.reading.difference import Change as Change
from torch_promote.reading.difference import Difference as Difference
from torch_promote.reading.difference import DifferingCall as DifferingCall
from torch_promote.reading.difference import ModuleGrowth as ModuleGrowth
from torch_promote.reading.difference import StepDifference as StepDifference
from torch_promote.reading.divergence import Fact as Fact
from torch_promote.reading.explanation import Explanation as Explanation
from torch_promote.reading.explanation import ExplanationRow as ExplanationRow
from torch_promote.reading.matching import Match as Match
from torch_promote.reading.matching import NearMiss as NearMiss
from torch_promote.reading.monitor import Alarm as Alarm
from torch_promote.reading.monitor import Monitor as Monitor
from torch_promote.reading.trace_report import TraceReport as TraceReport
from torch_promote.recording.recording import CallGroup as CallGroup
from torch_promote.recording.recording import Calls as Calls
from torch_promote.recording.recording import CastGroup as CastGroup
from torch_promote.recording.recording import CastTable as CastTable
from torch_promote.recording.recording import Failure as Failure
from torch_promote.recording.recording import GroupTable as GroupTable
from torch_promote.recording.recording import OptimizerState as OptimizerState
from torch_promote.recording.recording import Read as Read
from torch_promote.recording.recording import Source as Source
from torch_promote.recording.recording import Step as Step
from torch_promote.recording.values import NonfiniteValues as NonfiniteValues
from torch_promote.recording.values import TensorRange as TensorRange
from torch_promote.recording.values import Values as Values
from torch_promote.regions.autocast import CacheInfo as CacheInfo
from torch_promote.regions.autocast import CacheMode as CacheMode
from torch_promote.regions.defaults import RegisteredPolicy as RegisteredPolicy
from torch_promote.regions.installation import Installation as Installation
from torch_promote.regions.module_policies import SetPolicies as SetPolicies
from torch_promote.regions.promotion import KindLike as KindLike
from torch_promote.regions.promotion import PromotionEvent as PromotionEvent
from torch_promote.regions.promotion import PromotionKind as PromotionKind
from torch_promote.report.block import ReportBlock as ReportBlock
