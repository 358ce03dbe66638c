from .call_plan import CALL as CALL
from .call_plan import CallPlan as CallPlan
from .call_plan import HostStep as HostStep
from .call_plan import Program as Program
from .call_plan import Source as Source
from .cluster import Cluster as Cluster
from .cut.cluster_program import compile as compile
from .cut.cluster_program import load as load
