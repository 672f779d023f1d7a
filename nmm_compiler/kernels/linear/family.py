"""The families of linear layers: one kernel, a name for each constructor of its record."""

from nmm_compiler.kernels.base import Family
from nmm_compiler.kernels.linear.corrected import CorrectedMLPSpec, CorrectedSpec
from nmm_compiler.kernels.linear.schedule import LinearSchedule, candidates, data_flow
from nmm_compiler.kernels.linear.specs import SPECS
from nmm_compiler.kernels.linear.work import work

LINEAR = tuple(
    Family(
        spec_class=spec_class,
        schedule_class=LinearSchedule,
        candidates=candidates,
        work=work,
        data_flow=data_flow,
    )
    for spec_class in (*SPECS, CorrectedSpec, CorrectedMLPSpec)
)
