// Words of the field, told where they stand.
(function () {
  "use strict";
  const WORDS = {
    ops: "Operators of the model after import; a kernel computes one or several of them.",
    kernels: "Functions of machine code, each called once for a run of ops.",
    transfers: "Copies of a value from one device to another.",
    arena: "One block of memory that a command buffer cuts into the tensors that live only inside of it.",
    arenas: "Blocks of memory that command buffers cut into the tensors that live only inside of them.",
    transient: "Memory that a call takes and gives back when it ends.",
    least: "The most bytes of transient tensors alive at one kernel: no plan for this order of kernels takes fewer.",
    weights: "Constants of the model as they are stored on the device.",
    share: "Fraction of a whole call.",
    precision: "Types of the numbers that a kernel multiplies; after -> the type in which it adds.",
    layout: "The order in which the elements of a tensor lie in memory: tiles that the device reads fastest.",
    packed: "When the tensor is brought into its layout.",
    work: "Operations of one call of the kernel: a multiplication and an addition are two.",
    region: "A command buffer: kernels of one device that are recorded once and run by one call.",
    "command buffer": "Kernels of one device that are recorded once and run by one call.",
    step: "Work of one device between two transfers; steps of different devices and calls can overlap.",
    "of peak": "Fraction of what the device was measured to reach; over 100 % where data lies in a cache, or fewer operations are needed than are counted.",
    "bound by": "What limits the kernel: arithmetic, or the bytes that it reads and writes.",
    "memory speed": "Measured on this machine: bytes per second of a sum over large tensors.",
    calls: "How often a call of the model calls it.",
    "encoded transfer": "A transfer of a tensor in its packed layout.",
  };

  // Text with its explanation behind it, if there is one.
  report.about = (text) => WORDS[String(text).toLowerCase()];
  report.word = (text) => (report.about(text) ? report.make("abbr", { title: report.about(text) }, text) : text);
})();
