"""Resize where the size of the image is symbolic: by whole numbers, with coordinates computed in the kernel."""

from __future__ import annotations

from tvm import relax, te, tirx

from .node import Node, dtype_of


def enlarged(node: Node, data: relax.Expr, scales: dict[int, float], mode: str, transformation: str) -> relax.Expr:
    """Images of symbolic size, enlarged by whole numbers: coordinates are computed by the kernel.

    Raises
    ------
    FrontendError: for other scales and for the modes that need the sizes in advance.
    """
    is_plain = mode != "cubic" and transformation in ("asymmetric", "half_pixel", "pytorch_half_pixel")
    if not is_plain or any(scale < 1 or scale != int(scale) for scale in scales.values()):
        raise node.refusal("resizes a symbolic dimension in a way that needs its size; give it with shapes=")
    for axis, scale in scales.items():
        if scale != 1:
            data = _enlarged_axis(node, data, axis, int(scale), mode, 0.0 if transformation == "asymmetric" else 0.5)
    return data


def _enlarged_axis(node: Node, data: relax.Expr, axis: int, scale: int, mode: str, center: float) -> relax.Expr:
    dtype = dtype_of(data)
    if mode == "linear" and dtype not in ("float32", "float64"):
        raise node.refusal(f"resizes {dtype} of a symbolic size linearly; give its size with shapes=")
    nearest_mode = node.attribute("nearest_mode", "round_prefer_floor")

    def compute(x: te.Tensor) -> te.Tensor:
        def element(*i: tirx.Expr) -> tirx.Expr:
            position = i[axis].astype("float32")
            source = (position + center) / float(scale) - center

            def at(place: tirx.Expr) -> tirx.Expr:
                held = tirx.max(tirx.min(place.astype("int64"), x.shape[axis] - 1), 0)
                return x(*i[:axis], held, *i[axis + 1 :])

            left = tirx.floor(source)
            if mode == "linear":
                share = (source - left).astype(dtype)
                return at(left) * (tirx.const(1, dtype) - share) + at(left + 1.0) * share
            rounded = {
                "floor": left,
                "ceil": tirx.ceil(source),
                "round_prefer_floor": tirx.ceil(source - 0.5),
                "round_prefer_ceil": tirx.floor(source + 0.5),
            }
            return at(rounded[nearest_mode])

        shape = [size * scale if a == axis else size for a, size in enumerate(x.shape)]
        return te.compute(shape, element, name="enlarge")

    return node.builder.emit_te(compute, data, primfunc_name_hint="enlarge")
