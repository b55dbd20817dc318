"""The benchmarks: stock autocast, ours, casts by hand and no autocast side by side.

    make bench                                       # or: python -m benchmarks, in an environment with the package
    make bench ARGS="--suite models --case 'MLP*'"
    make bench ARGS="--suite programs --device cuda-stand-in"
    make bench ARGS="--suite compile"                # ten minutes
    make bench-instructions                          # python -m benchmarks --suite instructions; needs valgrind

The suites:

    region        constructs, enters and leaves a region; one object; a decorated function; nested
    ops           calls with nothing to cast, activations to cast, cached weights, each cast policy
    overrides     calls with a user's policy, which stock does not support
    models        an MLP of many small layers, a Llama-like stack, an LSTM, a conv net: forward, training, evaluation
    caches        the modes of the cast cache on such models
    programs      these modes in programs: accumulation, checkpoints, LoRA, EMA, evaluation, generation; transformers'
    compile       steps compiled by torch.compile on the CPU, and the compilation
    instructions  instructions of calls, models and compiled steps, under valgrind: a quarter of an hour

The last two run only if you name them. The contenders of a case share one process:

    stock         under PyTorch's torch.autocast, also while `install` is in force
    ours          under my_autocast
    hand          no region; the casts are written in the code: the lower limit
    already_cast  no region, and inputs (for models: weights) that need no cast
    plain         no region and no cast: float32, unless there is nothing to cast

The JSON of `--json`. Times are nanoseconds per run; a spread is an object of `median`, `low` and `high`, the last two
its quartiles over the rounds. Compare only ratios of one run.

    torch, torch_promote   versions
    device, device_name    "cpu" or "cuda", and its model
    threads, rounds        the settings
    clock                  "cpu": CPU time of the process; "wall": wall-clock time; "kernels": no times, counts on the
                           stand-in device
    default_policy         the default policy of ours and where it comes from, or "" for PyTorch's
    skipped                names of programs without cases, because transformers is not installed
    interrupted            whether Ctrl-C ended the run before the last case
    results                a list with an object for each case:
      suite, case          the names
      ratio                spread of ours / stock; null if stock has no such feature
      ratio_to_hand        spread of ours / hand, or null
      overheads            by base, a contender: spread of (ours - base) / (stock - base), null, with a `reason`, if
                           stock - base is within its noise
      times_ns             by contender: spread of the time
      casts                by contender: casts in a step, of weights, activations and gradients, one for each tensor
      peak_bytes           by contender: peak memory of a step, above the memory held before it. On CUDA: of two runs in
                           a region, above the memory held before the region
      kernels              by contender, on CUDA: kernels in a run, after a first one in the same region. On a GPU,
                           torch.profiler counts them, without copies and fills of memory. On the stand-in device, each
                           call of an op that computes counts as one kernel, also for an op of lists
      copies               by contender, on the stand-in device: more about the casts of this run
        forward, backward  casts "narrowing" and "widening", that is, to a dtype of more bytes
        kernels            kernels that copy, to another dtype or not
        cast_kernels       of these, kernels that cast: a `_foreach_copy_` is one, and a cast for each of its tensors
        moved_bytes        bytes that the casts read and write
        allocated_bytes    bytes that the run allocates, including those that it frees again
      compiled             by contender, suite compile: kernels that Inductor generates, graphs, graph_breaks, frames
                           that Dynamo compiles, guards of all frames; for a compilation, calls of Python functions
      instructions         by contender, suite instructions: instructions in a run; nothing else is there then
"""
