"""Control flow of ONNX: branches (`If`), loops (`Loop`, `Scan`) and maps over sequences (`SequenceMap`)."""
