//! The integrated GPU of a Jetson board, read from sysfs where the management library has nothing to say.
//!
//! Node names differ by board and by JetPack and some files are missing on some boards (Thor has no `load`). So [`SysfsGpu::find`]
//! looks by pattern, keeps the paths it found, and whatever is missing is an unknown metric. The load file counts per mille.

use std::path::{Path, PathBuf};

use super::root::{Root, list, read_number, read_text, trimmed};

/// Folders in which a board's GPU lives, by board and by JetPack; the `load` file is asked for in each.
const DEVICE_FOLDERS: [&str; 9] = [
    "/sys/devices/platform/gpu.0",
    "/sys/devices/gpu.0",
    "/sys/devices/platform/bus@0/17000000.gpu",
    "/sys/devices/platform/17000000.gpu",
    "/sys/devices/platform/17000000.ga10b",
    "/sys/devices/17000000.ga10b",
    "/sys/devices/17000000.gv11b",
    "/sys/devices/17000000.gp10b",
    "/sys/devices/57000000.gpu",
];

/// Name endings of a Jetson GPU's frequency node.
const DEVFREQ_ENDINGS: [&str; 5] = [".gpu", ".ga10b", ".gv11b", ".gp10b", ".gm20b"];
/// Name beginning of the frequency node on Thor.
const DEVFREQ_THOR: &str = "gpu-gpc-";

/// Above this the load file holds something else than a load. The driver's window overshoots 1000 by a little.
const LOAD_PER_MILLE_MAX: u64 = 1100;

/// A load read from sysfs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Load {
    /// Busy share, in percent, at most 100.
    pub(super) percent: f64,
    /// The file said a little more than 100 %.
    pub(super) was_clamped: bool,
}

/// Reads a load file's text, which counts per mille; none when it holds no such number.
pub(super) fn parse_load(text: &str) -> Option<Load> {
    let per_mille: u64 = trimmed(text).parse().ok()?;
    if per_mille > LOAD_PER_MILLE_MAX {
        return None;
    }
    Some(Load {
        percent: per_mille.min(1000) as f64 / 10.0,
        was_clamped: per_mille > 1000,
    })
}

/// The files that answer for a board's GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct SysfsGpu {
    /// The board's name, for people.
    pub(super) name: String,
    load: Vec<PathBuf>,
    frequency_hz: Option<PathBuf>,
    temperature_millic: Option<PathBuf>,
    power: Option<PowerRail>,
}

/// A rail of an INA3221 power monitor.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PowerRail {
    millivolts: PathBuf,
    milliamperes: PathBuf,
}

impl SysfsGpu {
    /// Looks for an integrated GPU; none on hosts that have none.
    pub(super) fn find(root: &Root) -> Option<Self> {
        let is_tegra = root.path("/etc/nv_tegra_release").exists()
            || root
                .read("/proc/device-tree/compatible")
                .is_some_and(|text| text.contains("nvidia,tegra"));
        let devfreq = list(&root.path("/sys/class/devfreq"))
            .into_iter()
            .find(|node| {
                let name = file_name(node);
                let has_ending = DEVFREQ_ENDINGS.iter().any(|ending| name.ends_with(ending));
                // Other makers' boards call theirs `….gpu` as well; only NVIDIA's has a load file in the device's own folder.
                name.starts_with(DEVFREQ_THOR)
                    || (has_ending && (is_tegra || node.join("device/load").exists()))
            });
        let mut load: Vec<PathBuf> = DEVICE_FOLDERS
            .iter()
            .map(|folder| root.path(folder).join("load"))
            .collect();
        load.extend(devfreq.as_ref().map(|node| node.join("device/load")));
        load.retain(|path| path.exists());
        if load.is_empty() && devfreq.is_none() {
            return None;
        }
        let name = root
            .read("/proc/device-tree/model")
            .map(|text| trimmed(&text).to_owned())
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| "integrated GPU".to_owned());
        Some(Self {
            name,
            load,
            frequency_hz: devfreq.map(|node| node.join("cur_freq")),
            temperature_millic: thermal_zone(root),
            power: power_rail(root),
        })
    }

    /// Busy share; none on boards without the file.
    pub(super) fn load(&self) -> Option<Load> {
        self.load
            .iter()
            .find_map(|path| parse_load(&read_text(path)?))
    }

    /// Clock, in MHz.
    pub(super) fn clock_mhz(&self) -> Option<u64> {
        Some(read_number::<u64>(self.frequency_hz.as_ref()?)? / 1_000_000)
    }

    /// Temperature, in degrees Celsius. A GPU that is switched off reads as −256.
    pub(super) fn temperature_c(&self) -> Option<f64> {
        let millic: i64 = read_number(self.temperature_millic.as_ref()?)?;
        (millic > -200_000).then_some(millic as f64 / 1000.0)
    }

    /// Power of the GPU's rail, in milliwatts.
    pub(super) fn power_mw(&self) -> Option<u64> {
        let rail = self.power.as_ref()?;
        let millivolts: u64 = read_number(&rail.millivolts)?;
        let milliamperes: u64 = read_number(&rail.milliamperes)?;
        Some(millivolts.checked_mul(milliamperes)? / 1000)
    }
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

fn thermal_zone(root: &Root) -> Option<PathBuf> {
    list(&root.path("/sys/class/thermal"))
        .into_iter()
        .find_map(|zone| {
            let kind = read_text(&zone.join("type"))?.to_ascii_lowercase();
            trimmed(&kind).starts_with("gpu").then(|| zone.join("temp"))
        })
}

fn power_rail(root: &Root) -> Option<PowerRail> {
    list(&root.path("/sys/class/hwmon"))
        .into_iter()
        .filter(|monitor| {
            read_text(&monitor.join("name")).is_some_and(|name| trimmed(&name) == "ina3221")
        })
        .find_map(|monitor| {
            (1..=3).find_map(|channel| {
                let label = read_text(&monitor.join(format!("in{channel}_label")))?;
                label.contains("GPU").then(|| PowerRail {
                    millivolts: monitor.join(format!("in{channel}_input")),
                    milliamperes: monitor.join(format!("curr{channel}_input")),
                })
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::test_tree::Tree;

    #[test]
    fn field_004_the_load_file_counts_per_mille_and_is_range_checked() {
        let exact = |percent| {
            Some(Load {
                percent,
                was_clamped: false,
            })
        };
        assert_eq!(parse_load("0"), exact(0.0));
        assert_eq!(parse_load("150\n"), exact(15.0));
        assert_eq!(parse_load("1000"), exact(100.0));
        assert_eq!(
            parse_load("1003"),
            Some(Load {
                percent: 100.0,
                was_clamped: true
            })
        );
        assert_eq!(parse_load(""), None);
        assert_eq!(parse_load("150\0"), exact(15.0));
        assert_eq!(parse_load("abc"), None);
        assert_eq!(parse_load("-1"), None);
        assert_eq!(parse_load("4294967295"), None);
    }

    #[test]
    fn field_004_either_path_alone_will_do() {
        for path in [
            "/sys/devices/gpu.0/load",
            "/sys/devices/platform/gpu.0/load",
        ] {
            let tree = Tree::new().file(path, "150\n");
            let gpu = SysfsGpu::find(&tree.root()).expect("a GPU");
            assert_eq!(gpu.load().map(|load| load.percent), Some(15.0), "{path}");
        }
        let both = Tree::new()
            .file("/sys/devices/gpu.0/load", "150")
            .file("/sys/devices/platform/gpu.0/load", "150");
        assert_eq!(
            SysfsGpu::find(&both.root())
                .and_then(|gpu| gpu.load())
                .map(|load| load.percent),
            Some(15.0)
        );
    }

    #[test]
    fn a_board_in_full_is_read_and_units_are_converted() {
        let tree = Tree::new()
            .file("/proc/device-tree/model", "NVIDIA Jetson Orin Nano\0")
            .file("/sys/class/devfreq/17000000.gpu/cur_freq", "624750000\n")
            .file("/sys/class/devfreq/17000000.gpu/device/load", "437")
            .file("/sys/class/thermal/thermal_zone0/type", "cpu-thermal\n")
            .file("/sys/class/thermal/thermal_zone1/type", "gpu-thermal\n")
            .file("/sys/class/thermal/thermal_zone1/temp", "48500\n")
            .file("/sys/class/hwmon/hwmon1/name", "ina3221\n")
            .file("/sys/class/hwmon/hwmon1/in1_label", "VDD_IN\n")
            .file("/sys/class/hwmon/hwmon1/in2_label", "VDD_CPU_GPU_CV\n")
            .file("/sys/class/hwmon/hwmon1/in2_input", "4992\n")
            .file("/sys/class/hwmon/hwmon1/curr2_input", "200\n");
        let gpu = SysfsGpu::find(&tree.root()).expect("a GPU");
        assert_eq!(gpu.name, "NVIDIA Jetson Orin Nano");
        assert_eq!(gpu.load().map(|load| load.percent), Some(43.7));
        assert_eq!(gpu.clock_mhz(), Some(624));
        assert_eq!(gpu.temperature_c(), Some(48.5));
        assert_eq!(gpu.power_mw(), Some(998));
    }

    #[test]
    fn another_makers_board_is_not_taken_for_a_jetson() {
        let tree = Tree::new().file("/sys/class/devfreq/fb000000.gpu/cur_freq", "300000000\n");
        assert_eq!(SysfsGpu::find(&tree.root()), None);
        assert_eq!(SysfsGpu::find(&Tree::new().root()), None);
    }

    #[test]
    fn a_switched_off_gpu_has_no_temperature() {
        let tree = Tree::new()
            .file("/sys/devices/gpu.0/load", "0")
            .file("/sys/class/thermal/thermal_zone0/type", "GPU-therm\n")
            .file("/sys/class/thermal/thermal_zone0/temp", "-256000\n");
        assert_eq!(
            SysfsGpu::find(&tree.root()).and_then(|gpu| gpu.temperature_c()),
            None
        );
    }
}
