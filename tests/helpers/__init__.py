"""Helpers that several test files share. Test files do not import from each other.

Any test
    comparison: `assert_same`, which compares results bit for bit.
    thread_state: the autocast state of a thread, to compare before and after.
    subprocesses: Python processes that tests start, most of them forks of one that has imported torch.
    warm_python: the program of that process.
    fixtures: the fixtures of all tests.
    under_install: applies the options --installed and --installed-policy, and checks that a region is stock's.
    doc_blocks: the code blocks and commands of README.md and docs/.
    on_stand_in: runs tests and programs on the CUDA device made of host memory (tools/cuda_stand_in).

One op call
    side_by_side: runs a call under stock and under ours, and compares the two runs.
    autocast_lists: PyTorch's own lists of autocast ops, and the calls that their entries describe.
    rows: the rows of the op table: which exist here, sample calls of each, and the check of one row.
    override_effects: the same for a call under an override.
    operands: random operands in every layout.

Programs
    program_comparison: runs code under stock's regions and ours, and compares all results.
    casts: makers of both kinds of regions, what is cast in them, and a count of casts.
    threads_at_once: threads that work on weights which one of them trains, and the check of what the others compute.
    forking: forks a process repeatedly while its threads work.
    ends: programs that end in every way while torch_promote holds state.
    fast_cast: one cast by itself, its bits, and which kernel made it.
    planted_steps: steps with custom ops that lose accuracy, at random places, and a step that needs one override.
    models: small models that use weights in different ways.
    program_peaks: the peak memory of the programs of the benchmark, and its bounds.
    persistent_casts: products with a weight whose casts outlive the region.
    module_policies: a model with module policies, and a training step of it.
    checkpointing: a block with several policies, and a training step of it.
    compiling: inputs, gradients and regions for torch.compile.
    counted_collectives: an op like PyTorch's collectives, which counts its calls.
    process_groups: `end_group`, which ends the default process group at the end of a rank's program.
    gloo_ranks: runs functions in several processes over gloo.
    differing_ranks: regions that are the same on all ranks, or differ.
    rank_training: one training in several processes, under regions of several kinds.

Regions and policies
    interrupts: a program that interrupts regions by signals, and counts how often one stays open.
    installed: fixtures that install and uninstall, and a test of whether torch.autocast opens regions of ours.
    probes: the autocast state that a program can observe.
    program_defaults: a fixture that checks and restores the default policy and registered policies.
    policies: random policies for hypothesis, ways to copy one, and a policy with its file.
    library_for_policies: a library of custom ops, one for each property of a schema that policies depend on.
    op_registrations: how this PyTorch's registrations differ from the op table.

Reference
    fake_cuda_strides: strides of fake CUDA tensors, with and without PyTorch's Python meta kernels; also a script.
    array_libraries: the promotions of NumPy, JAX and array-api-strict, and golden tables of them; also a script.

Commands and checks
    command_line: runs the command line inside the test's process.
    autoloading: processes in which PyTorch finds this package's entry point.
    traced_commands: runs programs of the commands run, trace and find-nan in forks of a process that has torch.
    stand_in_runner: a parity runner with made-up entries, importable by worker processes.
    traced_programs: training steps of small models, and of samples of PyTorch's op database, to trace.
    traced_fsdp: a step of FSDP2 under a trace.
    counting_mode: a TorchDispatchMode that counts calls, in addition to a trace.
    plan_from_report: the reference's plan of a call, computed only from the trace's record.
    made_up_traces: reports of made-up calls, for the tests of pages, files and plots.
    nothing_left: a fixture that checks that runs of a step leave no policy, hook, stance or dtype behind.
    made_up_comparisons: made-up comparisons and tunings, for the tests of reports.
"""
