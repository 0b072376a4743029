//! The package clients, as child processes; one that is missing is named together with what to install.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// Downloads an npm package and unpacks it into `folder/package`.
pub(super) fn unpack_npm(package: &str, folder: &Path) -> anyhow::Result<()> {
    let name = run(
        folder,
        "npm",
        &["pack", "--silent", package],
        "apt-get install npm",
    )?;
    let archive = name
        .lines()
        .last()
        .context("npm did not say what it wrote")?;
    run(
        folder,
        "tar",
        &["-xzf", archive.trim()],
        "apt-get install tar",
    )
    .map(drop)
}

/// Downloads a Debian package and unpacks it into `folder/unpacked`, without installing it: systems may be set to drop documentation.
pub(super) fn unpack_deb(package: &str, folder: &Path) -> anyhow::Result<()> {
    let source = "it comes with Debian and Ubuntu; elsewhere, get the package's file by hand";
    run(folder, "apt-get", &["-qq", "download", package], source).with_context(|| {
        format!("cannot get {package} (`apt-get update` as root helps if it is not known)")
    })?;
    let archive = std::fs::read_dir(folder)?
        .filter_map(Result::ok)
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .find(|name| name.ends_with(".deb"))
        .context("apt-get wrote no package")?;
    run(folder, "dpkg", &["-x", &archive, "unpacked"], source).map(drop)
}

/// Runs a program in a folder; gives what it says on standard output. `how` tells how to get the program where it is missing.
pub(super) fn run(
    folder: &Path,
    program: &str,
    arguments: &[&str],
    how: &str,
) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!("there is no program {program} here: {how}")
        }
        Err(error) => return Err(error).with_context(|| format!("cannot start {program}")),
    };
    if !output.status.success() {
        bail!(
            "`{program} {}` ended with {}: {}",
            arguments.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
