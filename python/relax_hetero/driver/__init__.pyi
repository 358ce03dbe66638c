from .compile import compile as compile
from .compile import get_pipeline as get_pipeline
