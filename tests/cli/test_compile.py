"""`verax compile`: a folder that `verax generate --programs` starts with, for the attached device only."""


def test_a_command_starts_with_the_programs_of_another(run, folder, tmp_path):
    programs = tmp_path / "programs"
    sizes = ["--max-num-seqs", 2, "--max-model-len", 64, "--max-num-batched-tokens", 32]
    done = run("compile", folder, "-o", programs, "--device", "cpu", *sizes)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(f"{programs}: 4 programs, ")
    options = ["--model", folder, "--max-tokens", 4, "-t", 0, "--ignore-eos", "--programs", programs]
    done = run("generate", "abc", *options)
    assert done.status == 0
    assert done.out.startswith("abc")


def test_another_device_than_the_attached_one_is_refused(run, tmp_path):
    done = run("compile", "-o", tmp_path / "programs", "--device", "h100")
    assert done.status == 1
    assert "h100 is 'NVIDIA H100 80GB HBM3', attached is 'cpu'" in done.err
    assert not (tmp_path / "programs").exists()
