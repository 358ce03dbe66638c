"""Classes that programs import from ``onnxruntime.capi.onnxruntime_inference_collection``."""

from relax_hetero.compat import InferenceSession as InferenceSession
from relax_hetero.compat import IOBinding as IOBinding
from relax_hetero.compat import OrtDevice as OrtDevice
from relax_hetero.compat import OrtValue as OrtValue

Session = InferenceSession
