"""Linear layers of one x: the record, the specs that construct it, the schedule, the NKI kernel."""

from nmm_compiler.kernels.linear.specs import AdaptersSpec as AdaptersSpec
from nmm_compiler.kernels.linear.specs import GatedMLPSpec as GatedMLPSpec
from nmm_compiler.kernels.linear.specs import GatedMLPUpSpec as GatedMLPUpSpec
from nmm_compiler.kernels.linear.specs import LowRankSharedSpec as LowRankSharedSpec
from nmm_compiler.kernels.linear.specs import LowRankSpec as LowRankSpec
from nmm_compiler.kernels.linear.specs import MatmulSpec as MatmulSpec
