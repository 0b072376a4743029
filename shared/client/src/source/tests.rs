use std::io::Cursor;

use super::{Mjpeg, Source, SourceError, Y4m, open};

fn y4m(frames: usize, cut: usize) -> Vec<u8> {
    let mut bytes = b"YUV4MPEG2 W4 H2 F10:1 Ip A1:1 C420jpeg\n".to_vec();
    for _ in 0..frames {
        bytes.extend(b"FRAME\n");
        bytes.extend([235; 8]);
        bytes.extend([128; 4]);
    }
    bytes.truncate(bytes.len() - cut);
    bytes
}

fn jpeg() -> Vec<u8> {
    let mut bytes = Vec::new();
    let picture =
        image::RgbImage::from_fn(16, 16, |x, y| image::Rgb([x as u8 * 16, y as u8 * 16, 0]));
    picture
        .write_to(&mut Cursor::new(&mut bytes), image::ImageFormat::Jpeg)
        .unwrap();
    bytes
}

#[test]
fn y4m_white_is_white_and_times_follow_the_rate() {
    let mut source = Y4m::new("white.y4m", Cursor::new(y4m(2, 0))).unwrap();
    let first = source.next_picture().unwrap().unwrap();
    assert_eq!(first.content, "rgb8 4x2");
    assert!(first.bytes.iter().all(|b| *b >= 254), "{:?}", first.bytes);
    assert_eq!(source.next_picture().unwrap().unwrap().at.as_millis(), 100);
    assert!(source.next_picture().unwrap().is_none());
}

#[test]
fn a_truncated_y4m_gives_its_whole_frames_and_then_the_place() {
    let mut source = Y4m::new("cut.y4m", Cursor::new(y4m(2, 3))).unwrap();
    assert!(source.next_picture().unwrap().is_some());
    let error = source.next_picture().unwrap_err();
    assert!(matches!(&error, SourceError::Broken { frame: 1, .. }));
    assert!(
        error.to_string().contains("cut.y4m: frame 1 at byte")
            && error.to_string().contains("truncated"),
        "{error}"
    );
}

#[test]
fn strange_y4m_headers_are_refused() {
    for header in [
        "RIFF",
        "YUV4MPEG2 W0 H2",
        "YUV4MPEG2 W4",
        "YUV4MPEG2 W4 H2 C420p10",
        "YUV4MPEG2 W99999 H2",
    ] {
        assert!(
            Y4m::new("x", Cursor::new(format!("{header}\n"))).is_err(),
            "{header}"
        );
    }
    // 180 000 frames/s is not believed.
    let source = Y4m::new("x", Cursor::new("YUV4MPEG2 W4 H2 F180000:1\n")).unwrap();
    assert!(source.describe().contains("25.0"));
}

#[test]
fn mjpeg_splits_at_picture_borders_and_names_a_truncation() {
    let one = jpeg();
    let mut bytes = [one.clone(), one.clone()].concat();
    let mut source = Mjpeg::new("m.mjpeg", Cursor::new(bytes.clone()), 5.0);
    assert_eq!(source.next_picture().unwrap().unwrap().bytes, one);
    assert_eq!(source.next_picture().unwrap().unwrap().bytes, one);
    assert!(source.next_picture().unwrap().is_none());

    bytes.truncate(bytes.len() - 10);
    let mut source = Mjpeg::new("m.mjpeg", Cursor::new(bytes), 5.0);
    assert!(source.next_picture().unwrap().is_some());
    assert!(
        source
            .next_picture()
            .unwrap_err()
            .to_string()
            .contains("truncated")
    );
    let mut source = Mjpeg::new("m.mjpeg", Cursor::new(b"not a picture".to_vec()), 5.0);
    assert!(
        source
            .next_picture()
            .unwrap_err()
            .to_string()
            .contains("FF D8")
    );
}

#[test]
fn folders_are_read_in_name_order_and_empty_ones_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert!(open(folder.path().to_str().unwrap(), 5.0).is_err());
    std::fs::write(folder.path().join("b.jpg"), jpeg()).unwrap();
    image::RgbImage::new(3, 2)
        .save(folder.path().join("a.png"))
        .unwrap();
    std::fs::write(folder.path().join("notes.txt"), "x").unwrap();
    let mut source = open(folder.path().to_str().unwrap(), 5.0).unwrap();
    assert_eq!(source.next_picture().unwrap().unwrap().content, "rgb8 3x2");
    assert_eq!(source.next_picture().unwrap().unwrap().content, "jpeg");
    assert!(source.next_picture().unwrap().is_none());
}

#[test]
fn a_missing_file_is_named() {
    let Err(error) = open("/nowhere/lobby.y4m", 5.0) else {
        panic!("it does not exist")
    };
    assert!(error.to_string().contains("/nowhere/lobby.y4m"), "{error}");
}

#[test]
fn addresses_of_other_protocols_are_refused() {
    for name in ["file:///etc/hosts", "concat://a|b", "-x://y", "://"] {
        let Err(error) = open(name, 5.0) else {
            panic!("{name} is no address of a video")
        };
        assert!(error.to_string().contains("rtsp"), "{error}");
    }
}

#[test]
fn a_name_is_never_an_option_or_a_protocol() {
    for name in ["-version", "pipe:0", "concat:a|b", "-"] {
        let Err(error) = open(name, 5.0) else {
            panic!("{name} does not exist")
        };
        let is_missing = matches!(&error, SourceError::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound);
        assert!(is_missing, "{error}");
    }
}
