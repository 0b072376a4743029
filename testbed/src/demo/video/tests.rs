use std::time::Duration;

use super::*;

/// A motion JPEG of so many pictures of 64 × 48.
fn mjpeg(folder: &Path, pictures: usize) -> String {
    let path = folder.join("own.mjpeg");
    let mut all = Vec::new();
    for number in 0..pictures {
        let shade = (number % 256) as u8;
        all.extend(encode(&vec![shade; 64 * 48 * 3], 64, 48).unwrap());
    }
    std::fs::write(&path, all).unwrap();
    path.to_str().unwrap().to_owned()
}

fn refused(video: &str) -> String {
    format!("{:#}", read(video, 10.0).unwrap_err())
}

#[test]
fn a_video_is_kept_as_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let pictures = read(&mjpeg(folder.path(), 120), 10.0).unwrap();
    assert_eq!(pictures.len(), 120);
    let kept = folder.path().join("kept.mjpeg");
    let digest = keep(&pictures, &kept).unwrap();
    let again = super::super::footage::read(&kept, 10.0).unwrap();
    assert_eq!(again, pictures);
    let whole = std::fs::read(kept).unwrap();
    assert_eq!(digest, hex::encode(Sha256::digest(whole)));
}

#[test]
fn what_cannot_tell_the_story_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let short = refused(&mjpeg(folder.path(), 34));
    assert!(
        short.contains("3.4 s long") && short.contains("at least 10 s"),
        "{short}"
    );

    let video = mjpeg(folder.path(), 120);
    let whole = std::fs::read(&video).unwrap();
    std::fs::write(&video, &whole[..whole.len() - 40]).unwrap();
    let cut = refused(&video);
    assert!(
        cut.contains("frame 119") && cut.contains("truncated"),
        "{cut}"
    );

    std::fs::write(&video, b"not a video").unwrap();
    assert!(refused(&video).contains("FF D8"));
    std::fs::write(&video, b"").unwrap();
    assert!(refused(&video).contains("0.0 s long"));
    assert!(refused("/nowhere/own.mp4").contains("no such file"));
    assert!(refused("gopher://host/own.mp4").contains("rtsp"));
}

#[test]
fn other_rates_and_sizes_become_the_camera_s() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("own.y4m");
    // 25 pictures a second for 12 s.
    let mut all = b"YUV4MPEG2 W4 H2 F25:1 Ip A1:1 C420jpeg\n".to_vec();
    for number in 0..300_u32 {
        all.extend(b"FRAME\n");
        all.extend([(number / 2) as u8; 8]);
        all.extend([128; 4]);
    }
    std::fs::write(&path, all).unwrap();
    let pictures = read(path.to_str().unwrap(), 10.0).unwrap();
    assert!((119..=121).contains(&pictures.len()), "{}", pictures.len());

    let wide = Picture::rgb(2_000, 1_000, vec![9; 2_000 * 1_000 * 3], Duration::ZERO);
    let small = as_camera(wide).unwrap();
    let small = image::load_from_memory_with_format(&small, ImageFormat::Jpeg).unwrap();
    assert_eq!((small.width(), small.height()), (768, 384));
}

#[test]
fn neither_folders_nor_passwords_are_shown() {
    assert_eq!(shown("/home/me/a b.mp4"), "a b.mp4");
    assert_eq!(
        shown("rtsp://me:secret@camera.local:554/stream?key=1"),
        "rtsp://camera.local:554"
    );
    assert_eq!(shown("http://host?token=a@b"), "http://host");
}
