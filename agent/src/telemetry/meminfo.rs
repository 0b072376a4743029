//! Memory of the host, from `/proc/meminfo` below a relocatable root.

use super::root::Root;

/// What the kernel says about the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    /// Installed, in bytes.
    pub total_bytes: u64,
    /// What could be taken without swapping, in bytes.
    pub available_bytes: Option<u64>,
}

/// Reads it; none when the file is missing or not as the kernel writes it.
pub fn read(root: &Root) -> Option<HostMemory> {
    parse(&root.read("/proc/meminfo")?)
}

fn parse(text: &str) -> Option<HostMemory> {
    let field = |name: &str| -> Option<u64> {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    };
    let total_bytes = field("MemTotal").filter(|&bytes| bytes > 0)?;
    // Kernels before 3.14 have no MemAvailable; free and cached together is what it replaced.
    let available = field("MemAvailable").or_else(|| {
        field("MemFree")?
            .checked_add(field("Buffers")?)?
            .checked_add(field("Cached")?)
    });
    Some(HostMemory {
        total_bytes,
        available_bytes: available.filter(|&bytes| bytes <= total_bytes),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_figures_are_read_in_bytes() {
        let text = "MemTotal:       16384000 kB\nMemFree:  100 kB\nMemAvailable:    8192000 kB\n";
        assert_eq!(
            parse(text),
            Some(HostMemory {
                total_bytes: 16_384_000 * 1024,
                available_bytes: Some(8_192_000 * 1024)
            })
        );
        let old = "MemTotal: 1000 kB\nMemFree: 100 kB\nBuffers: 10 kB\nCached: 200 kB\n";
        assert_eq!(
            parse(old).and_then(|memory| memory.available_bytes),
            Some(310 * 1024)
        );
    }

    #[test]
    fn what_cannot_be_is_unknown() {
        assert_eq!(parse(""), None);
        assert_eq!(parse("MemTotal: 0 kB"), None);
        assert_eq!(parse("MemTotal: 18446744073709551615 kB"), None);
        let more_than_all = "MemTotal: 1000 kB\nMemAvailable: 18446744073707737 kB\n";
        assert_eq!(
            parse(more_than_all).map(|memory| memory.available_bytes),
            Some(None)
        );
    }
}
