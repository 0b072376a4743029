use std::path::Path;

use compass_coordinator::configs::Configs;
use compass_shared::spec::documents::parse_query;

use super::*;

#[test]
fn half_precision_is_widened_exactly() {
    for (half, single) in [
        (0x0000, 0.0),
        (0x3c00, 1.0),
        (0xc000, -2.0),
        (0x3555, 0.333_251_95),
        (0x0001, 2f32.powi(-24)),
        (0x7bff, 65504.0),
        (0x7c00, f32::INFINITY),
    ] {
        assert_eq!(convert::widen(half), single, "{half:#06x}");
    }
    assert!(convert::widen(0x7e00).is_nan());
}

#[test]
fn a_file_that_is_no_model_is_refused() {
    let tail = [&b"\x10\0\0\0TFL3"[..], &[0xff; 64]].concat();
    for bytes in [&b""[..], b"x", &[0xff; 100], &[0; 100], &tail] {
        assert!(convert::to_onnx(bytes, 300).is_err());
    }
}

#[test]
fn a_missing_client_is_named_with_what_to_install() {
    let error = clients::run(
        Path::new("."),
        "no-such-client",
        &["x"],
        "apt-get install the-package",
    )
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no program no-such-client here: apt-get install the-package"
    );
}

#[test]
fn a_file_of_another_content_is_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let error = keep(folder.path(), &VIDEO, b"something else").unwrap_err();
    assert!(error.to_string().contains("is not the known one"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    std::fs::write(folder.path().join(VIDEO.file), b"something else").unwrap();
    assert!(!is_kept(folder.path(), &VIDEO).unwrap());
}

#[test]
fn the_real_configuration_is_valid_and_names_the_fetched_models() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/real");
    let configs = Configs::load(Some(&folder)).unwrap();
    let kinds = &configs.catalogue.0;
    let detector = kinds
        .values()
        .find(|entry| !entry.artifacts.is_empty())
        .unwrap();
    let named = detector.artifacts.iter().map(|a| a.digest.to_string());
    assert!(named.eq(MODELS.iter().map(|(_, item)| item.sha256.to_owned())));
    let file = folder.join("queries/yard.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    let query = parse_query("yard", &text, &configs.pipelines, &configs.catalogue).unwrap();
    assert_eq!(query.pipeline.operators.len(), 5);
}
