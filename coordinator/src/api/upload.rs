//! Bodies of requests: read whole within bounds, and read away when they are refused.
//!
//! Who hangs up on a client that is still writing takes the answer away from it: the rest that is on its way resets the connection. So a
//! body that is too large is read to its end, within bounds of its own, before the refusal goes out.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::header::{CONTENT_LENGTH, EXPECT};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;

use super::BODY_BYTES_MAX;
use super::errors::unreadable;
use crate::control::{Refusal, RefusalKind};

/// A body must have arrived by then.
const READ_WITHIN: Duration = Duration::from_secs(30);
/// As much of a refused body is read away, at most for so long: enough for every honest mistake, and little for an attack.
const DRAIN_BYTES_MAX: usize = 256 << 20;
const DRAIN_WITHIN: Duration = Duration::from_secs(10);

/// Reads a request's body before anything is done with it.
pub(super) async fn read_whole(request: Request, next: Next) -> Response {
    let (parts, mut body) = request.into_parts();
    let announced = parts.headers.get(CONTENT_LENGTH);
    let announced = announced.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    let waits = parts.headers.contains_key(EXPECT);
    if waits && announced.is_some_and(|bytes| bytes > BODY_BYTES_MAX) {
        // It has sent nothing yet, and will not.
        return too_large().into_response();
    }
    match tokio::time::timeout(READ_WITHIN, collect(&mut body)).await {
        Ok(Ok(whole)) => {
            next.run(Request::from_parts(parts, Body::from(whole)))
                .await
        }
        Ok(Err(refusal)) => {
            drain(&mut body).await;
            refusal.into_response()
        }
        Err(_) => {
            let seconds = READ_WITHIN.as_secs();
            unreadable(format!("the body did not arrive within {seconds} s")).into_response()
        }
    }
}

async fn collect(body: &mut Body) -> Result<Bytes, Refusal> {
    let mut whole = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(unreadable)?.into_data() else {
            continue;
        };
        if whole.len() + data.len() > BODY_BYTES_MAX {
            return Err(too_large());
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole.into())
}

fn too_large() -> Refusal {
    let error =
        format!("the body has more than {BODY_BYTES_MAX} bytes, which is all that is read here");
    Refusal::new(RefusalKind::TooMuch, error).hint("model files go to /v1/artifacts/NAME")
}

/// Reads away what is left of a body that was refused, so that its sender gets to read why.
pub(super) async fn drain(body: &mut Body) {
    let rest = async {
        let mut bytes = 0;
        while let Some(Ok(frame)) = body.frame().await {
            bytes += frame.data_ref().map_or(0, Bytes::len);
            if bytes > DRAIN_BYTES_MAX {
                return;
            }
        }
    };
    // Whoever is slower than that has to do without the answer.
    let _ = tokio::time::timeout(DRAIN_WITHIN, rest).await;
}
