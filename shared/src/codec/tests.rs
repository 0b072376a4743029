use std::collections::BTreeMap;

use proptest::prelude::*;
use serde::Deserialize;

use super::*;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Sample {
    Empty,
    Named { id: u64, name: String, ratio: f64 },
    List(Vec<Sample>),
    Map(BTreeMap<String, Option<i32>>),
    Blob(Vec<u8>),
}

fn sample() -> Sample {
    Sample::List(vec![
        Sample::Empty,
        Sample::Named {
            id: 300,
            name: "edge-1".to_owned(),
            ratio: 0.5,
        },
        Sample::Map(BTreeMap::from([
            ("a".to_owned(), Some(-1)),
            ("b".to_owned(), None),
        ])),
        Sample::Blob(vec![1, 2, 3]),
    ])
}

#[test]
fn golden_bytes_pin_the_configuration() {
    let bytes = encode(&sample()).unwrap();
    assert_eq!(
        hex::encode(&bytes),
        "02040001fb2c0106656467652d31000000000000e03f0302016101010162000403010203"
    );
    assert_eq!(decode::<Sample>(&bytes).unwrap(), sample());
    let frame = encode_frame(1, &sample()).unwrap();
    assert_eq!(
        hex::encode(&frame[..HEADER_BYTES]),
        "00000024010001",
        "length, codec, schema"
    );
    assert_eq!(&frame[HEADER_BYTES..], bytes);
}

#[test]
fn trailing_bytes_are_an_error() {
    let mut bytes = encode(&sample()).unwrap();
    bytes.push(0);
    assert_eq!(
        decode::<Sample>(&bytes).unwrap_err(),
        CodecError::Trailing { extra: 1 }
    );
}

#[test]
fn messages_above_the_limit_are_refused_both_ways() {
    let blob = Sample::Blob(vec![0; MESSAGE_BYTES_MAX]);
    assert!(matches!(encode(&blob), Err(CodecError::TooLarge { .. })));
    let zeros = vec![0; MESSAGE_BYTES_MAX + 1];
    assert!(matches!(
        decode::<Sample>(&zeros),
        Err(CodecError::TooLarge { .. })
    ));
}

#[test]
fn a_huge_length_prefix_is_refused_without_allocating() {
    // Variant 4 (Blob), then a 64-bit length of 2^40.
    let bytes = [4, 0xfd, 0, 0, 0, 0, 0, 1, 0, 0];
    assert!(matches!(
        decode::<Sample>(&bytes),
        Err(CodecError::Decode { .. })
    ));
}

#[test]
fn each_wrong_header_has_its_own_error() {
    let frame = encode_frame(2, &sample()).unwrap();
    let read = |frame: &[u8]| decode_frame::<Sample>(2, 64, frame);
    assert_eq!(read(&frame).unwrap(), sample());
    let with = |index: usize, value: u8| {
        let mut frame = frame.clone();
        frame[index] = value;
        read(&frame).unwrap_err()
    };
    assert!(matches!(with(0, 1), CodecError::TooLarge { limit: 64, .. }));
    assert_eq!(
        with(3, 0x23),
        CodecError::FrameLength {
            found: 43,
            expected: 42
        }
    );
    assert_eq!(with(4, 9), CodecError::UnknownCodec { found: 9 });
    assert_eq!(
        with(6, 1),
        CodecError::WrongSchema {
            found: 1,
            expected: 2
        }
    );
    assert_eq!(
        read(&frame[..3]).unwrap_err(),
        CodecError::FrameLength {
            found: 3,
            expected: 7
        }
    );
}

#[test]
fn a_type_the_codec_cannot_express_fails_when_encoded_or_read() {
    #[derive(Debug, Serialize, Deserialize)]
    #[serde(untagged)]
    enum Guess {
        Number(u8),
    }
    let bytes = encode(&Guess::Number(3)).unwrap();
    assert!(matches!(
        decode::<Guess>(&bytes),
        Err(CodecError::Decode { .. })
    ));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2_000)) {
        let _ = decode::<Sample>(&bytes);
        let _ = decode::<Vec<String>>(&bytes);
        let _ = decode_frame::<Sample>(1, MESSAGE_BYTES_MAX, &bytes);
    }

    #[test]
    fn truncated_messages_are_errors(cut in 0_usize..36) {
        let bytes = encode(&sample()).unwrap();
        prop_assert!(decode::<Sample>(&bytes[..cut]).is_err());
    }

    #[test]
    fn a_flipped_byte_never_panics(index in 0_usize..36, flip in 1_u8..) {
        let mut bytes = encode(&sample()).unwrap();
        bytes[index] ^= flip;
        let _ = decode::<Sample>(&bytes);
    }

    #[test]
    fn values_survive_the_round_trip(id in any::<u64>(), name in ".{0,40}", blob in proptest::collection::vec(any::<u8>(), 0..200)) {
        let message = Sample::List(vec![Sample::Named { id, name, ratio: 0.25 }, Sample::Blob(blob)]);
        let frame = encode_frame(7, &message).unwrap();
        prop_assert_eq!(decode_frame::<Sample>(7, MESSAGE_BYTES_MAX, &frame).unwrap(), message);
    }
}
