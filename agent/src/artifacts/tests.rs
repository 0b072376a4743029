use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// Serves one artifact, cut off after some bytes of each fetch.
struct Server {
    content: Vec<u8>,
    cut_after: usize,
    fetches: AtomicUsize,
    offsets: Mutex<Vec<u64>>,
}

impl Server {
    fn new(content: &[u8]) -> Self {
        Self {
            content: content.to_vec(),
            cut_after: usize::MAX,
            fetches: AtomicUsize::new(0),
            offsets: Mutex::default(),
        }
    }
}

#[async_trait]
impl ArtifactSource for Server {
    async fn fetch(
        &self,
        _digest: Digest,
        offset: u64,
        sink: &mut (dyn ArtifactSink + Send),
    ) -> Result<(), String> {
        self.fetches.fetch_add(1, Ordering::Relaxed);
        self.offsets.lock().unwrap().push(offset);
        let rest = &self.content[offset as usize..];
        for (number, piece) in rest.chunks(3).enumerate() {
            tokio::task::yield_now().await;
            if number * 3 >= self.cut_after {
                return Err("the link broke".to_owned());
            }
            sink.write(piece).map_err(|e| e.to_string())?;
        }
        Ok(())
    }
}

fn cache(folder: &Path, max_bytes: u64) -> ArtifactCache {
    ArtifactCache::new(folder.join("artifacts"), max_bytes).unwrap()
}

const CONTENT: &[u8] = b"the weights of a small network";

#[tokio::test]
async fn an_artifact_is_fetched_once_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let digest = Digest::of(CONTENT);
    let server = Server::new(CONTENT);
    let first = cache(folder.path(), 100);
    let ensure = || first.ensure(digest, CONTENT.len() as u64, &server);
    let (a, b) = tokio::join!(ensure(), ensure());
    assert_eq!(a, b);
    assert_eq!(fs::read(a.unwrap()).unwrap(), CONTENT);
    assert_eq!(server.fetches.load(Ordering::Relaxed), 1);
    assert!(first.lock().gates.is_empty() && first.lock().fetching.is_empty());

    let after_restart = cache(folder.path(), 100);
    assert_eq!(after_restart.held(), [digest]);
    let again = after_restart
        .ensure(digest, CONTENT.len() as u64, &server)
        .await;
    assert_eq!(fs::read(again.unwrap()).unwrap(), CONTENT);
    assert_eq!(server.fetches.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_cut_fetch_goes_on_where_it_stopped_also_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let digest = Digest::of(CONTENT);
    let mut server = Server::new(CONTENT);
    server.cut_after = 9;
    for _ in 0..2 {
        let cut = cache(folder.path(), 100)
            .ensure(digest, CONTENT.len() as u64, &server)
            .await;
        assert!(
            matches!(cut, Err(ArtifactError::Fetch { reason, .. }) if reason == "the link broke")
        );
    }
    assert_eq!(cache(folder.path(), 100).held(), []);
    server.cut_after = usize::MAX;
    let path = cache(folder.path(), 100)
        .ensure(digest, CONTENT.len() as u64, &server)
        .await
        .unwrap();
    assert_eq!(fs::read(path).unwrap(), CONTENT);
    assert_eq!(*server.offsets.lock().unwrap(), [0, 9, 18]);
}

#[tokio::test]
async fn what_is_not_the_artifact_never_gets_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(folder.path(), 100);
    let digest = Digest::of(CONTENT);
    let length = CONTENT.len() as u64;
    let mut forged = CONTENT.to_vec();
    forged[3] ^= 1;
    let corrupt = cache.ensure(digest, length, &Server::new(&forged)).await;
    assert!(
        matches!(corrupt, Err(ArtifactError::Corrupt { .. })),
        "{corrupt:?}"
    );
    let longer = [CONTENT, b"and more"].concat();
    let longer = cache.ensure(digest, length, &Server::new(&longer)).await;
    assert!(
        matches!(&longer, Err(ArtifactError::Fetch { reason, .. }) if reason.contains("announced")),
        "{longer:?}"
    );
    let shorter = Server::new(&CONTENT[..10]);
    fs::remove_file(cache.folder.join(digest.to_string()).with_extension("part")).unwrap();
    let shorter = cache.ensure(digest, length, &shorter).await;
    assert!(
        matches!(&shorter, Err(ArtifactError::Fetch { reason, .. }) if reason.contains("10 of 30")),
        "{shorter:?}"
    );
    assert_eq!(cache.held(), []);
}

#[tokio::test]
async fn a_bad_beginning_is_thrown_away_and_a_rotten_file_is_fetched_again() {
    let folder = tempfile::tempdir().unwrap();
    let digest = Digest::of(CONTENT);
    let length = CONTENT.len() as u64;
    let path = folder.path().join("artifacts").join(digest.to_string());
    let server = Server::new(CONTENT);
    let first = cache(folder.path(), 100);
    fs::write(path.with_extension("part"), b"bad beginning").unwrap();
    first.ensure(digest, length, &server).await.unwrap();
    assert_eq!(*server.offsets.lock().unwrap(), [13, 0]);

    let mut rotten = CONTENT.to_vec();
    rotten[0] ^= 1;
    fs::write(&path, rotten).unwrap();
    cache(folder.path(), 100)
        .ensure(digest, length, &server)
        .await
        .unwrap();
    assert_eq!(fs::read(&path).unwrap(), CONTENT);
    assert_eq!(server.fetches.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn the_longest_unused_goes_first_and_the_protected_stay() {
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(folder.path(), 25);
    let contents: Vec<Vec<u8>> = (0..4).map(|n| vec![n; 10]).collect();
    let digests: Vec<Digest> = contents.iter().map(|c| Digest::of(c)).collect();
    let ensure = async |n: usize| {
        cache
            .ensure(digests[n], 10, &Server::new(&contents[n]))
            .await
    };
    let age = |n: usize, seconds: u64| {
        let file = File::open(cache.folder.join(digests[n].to_string())).unwrap();
        let age = std::time::Duration::from_secs(seconds);
        file.set_modified(SystemTime::now() - age).unwrap();
    };
    ensure(0).await.unwrap();
    ensure(1).await.unwrap();
    age(0, 20);
    age(1, 10);
    ensure(0).await.unwrap();
    ensure(2).await.unwrap();
    let mut expected = vec![digests[0], digests[2]];
    expected.sort();
    assert_eq!(cache.held(), expected, "0 was used again, so 1 went");
    cache.protect([digests[0], digests[2]].into());
    assert!(matches!(
        ensure(3).await,
        Err(ArtifactError::TooLarge { .. })
    ));
    cache.protect([digests[0]].into());
    ensure(3).await.unwrap();
    assert!(!cache.held().contains(&digests[2]));
    let giant = cache
        .ensure(Digest::of(b"?"), u64::MAX, &Server::new(b"?"))
        .await;
    assert!(matches!(giant, Err(ArtifactError::TooLarge { .. })));
}
