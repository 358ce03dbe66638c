"""Bytes of models against the package's own message."""

from __future__ import annotations

import pytest

pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")

from relax_hetero.llm.sentencepiece_model import sentencepiece_model  # noqa: E402


@pytest.mark.parametrize("has_bytes", [False, True])
def test_the_package_reads_the_written_model(has_bytes):
    names = ["<unk>", "a", "\u2581the", "x" * 300, ""]
    scores, kinds = [0.0, -1.5, -2e9, 3.25, 0.1], [2, 1, 1, 4, 6]
    proto = pb2.ModelProto.FromString(sentencepiece_model(names, scores, kinds, has_bytes))
    assert [(piece.piece, piece.type) for piece in proto.pieces] == list(zip(names, kinds, strict=True))
    assert [piece.score for piece in proto.pieces] == pytest.approx(scores, rel=1e-6)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    assert trainer.model_type == trainer.BPE and trainer.byte_fallback == has_bytes
    assert normalizer.escape_whitespaces
    assert not normalizer.add_dummy_prefix and not normalizer.remove_extra_whitespaces
