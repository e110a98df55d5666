"""What a training step takes of a GPU's memory, from XLA's own GPU compiler and no GPU."""

from lowmembp_jax.memory.comparison import Comparison as Comparison
from lowmembp_jax.memory.comparison import MethodPlan as MethodPlan
from lowmembp_jax.memory.comparison import compare as compare
from lowmembp_jax.memory.compilation import compile_for as compile_for
from lowmembp_jax.memory.devices import DEVICES as DEVICES
from lowmembp_jax.memory.devices import Device as Device
from lowmembp_jax.memory.devices import get_device as get_device
from lowmembp_jax.memory.devices import missing_wheels as missing_wheels
from lowmembp_jax.memory.devices import topology as topology
from lowmembp_jax.memory.hlo.cost import cost as cost
from lowmembp_jax.memory.hlo.cost_totals import Cost as Cost
from lowmembp_jax.memory.hlo.cost_totals import Kernel as Kernel
from lowmembp_jax.memory.plan import PARTS as PARTS
from lowmembp_jax.memory.plan import LiveBuffer as LiveBuffer
from lowmembp_jax.memory.plan import Plan as Plan
from lowmembp_jax.memory.plan import plan as plan
from lowmembp_jax.memory.planning.cache import plan_cache_directory as plan_cache_directory
from lowmembp_jax.memory.planning.workload import METHODS as METHODS
from lowmembp_jax.memory.planning.workload import Workload as Workload
from lowmembp_jax.memory.residuals import residuals as residuals
from lowmembp_jax.memory.residuals import saved_bytes as saved_bytes
from lowmembp_jax.memory.saved_residuals.table import Residual as Residual
from lowmembp_jax.memory.saved_residuals.table import Residuals as Residuals
